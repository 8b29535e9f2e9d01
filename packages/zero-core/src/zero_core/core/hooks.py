"""Hooks on the model's modules and parameters, which call `zero_core.core.passes.Passes`.

[Note: the engine's hooks and others]
Other hooks on a unit's module (such as weight normalization) may read the unit's parameters. So the
unit is gathered before these hooks and released after them. The engine's pre-forward hook is
prepended. At each forward, the engine's forward hook is moved behind hooks added later.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from zero_core._torch import get_grad, is_own_graph, outside_graphs, pytree, set_grad
from zero_core.core.passes import Passes
from zero_core.core.saved import is_in_backward
from zero_core.core.unit import Unit


def install(passes: Passes, modules: Sequence[nn.Module]) -> list[Any]:
    """Register hooks on the units' ``modules`` (the model first) and on trainable parameters.

    Returns handles, each with a ``remove`` method.
    """
    handles: list[Any] = []
    for unit, module in zip(passes.units.units, modules, strict=True):
        if not unit.is_tail:  # the tail's module is the model, which has the root's hooks
            handles += _hook_unit(passes, unit, module)
        for number, grads in enumerate(unit.grads):
            for position, param in enumerate(grads.params):
                handles.append(_hook_gradient(passes, unit.index, number, position, param))
    # A module inside a unit may be called directly: by a model that calls ``block.attention``, or
    # by activation checkpointing of a part of a block. Such modules get a hook that gathers the
    # unit. `UnitSet.part_hooks` holds the hooks inside blocks. Below stage 3 it waits for
    # values that are being exchanged: a kernel may read a parameter without torch's dispatch.
    for module in modules[0].modules():
        if isinstance(module, ParametrizationList):
            continue  # each read of the weight calls this module, and a read must not gather
        own = passes.units_of(module, recurse=False)
        is_one_graph = False
        if is_own_graph(module):  # compiled, together with its submodules
            within = passes.units_of(module)
            if len(within) == 1:
                own, is_one_graph = within, True
        for unit in own:
            if module is not modules[unit.index]:
                hook = _part_hook(passes, unit, is_one_graph=is_one_graph)
                if is_one_graph:
                    hook = outside_graphs(hook)
                if unit.is_block:
                    passes.units.part_hooks.add(module, hook)
                else:
                    handles.append(module.register_forward_pre_hook(hook, prepend=True))
    return [*handles, passes.units.part_hooks, passes]


def _hook_unit(passes: Passes, unit: Unit, module: nn.Module) -> list[RemovableHandle]:
    def release(module: nn.Module, args: Any, output: Any) -> None:
        if not is_in_backward():
            error = sys.exception() if output is None else None
            tensors = (output,) if isinstance(output, torch.Tensor) else pytree.tree_leaves(output)
            needs_grad = any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)
            passes.driver.leave(unit, needs_grad=needs_grad, error=error)

    last = module.register_forward_hook(outside_graphs(release), always_call=True)

    def gather(module: nn.Module, args: Any) -> None:
        others = last.hooks_dict_ref()
        assert others is not None, "the module that is called holds its hooks"
        if next(reversed(others)) != last.id:
            others.move_to_end(last.id)
        if is_in_backward():  # activation checkpointing recomputes the block
            passes.backward.enter_recompute(unit)
        else:
            passes.driver.enter(unit, module)

    return [module.register_forward_pre_hook(outside_graphs(gather), prepend=True), last]


def _hook_gradient(
    passes: Passes, index: int, number: int, position: int, param: nn.Parameter
) -> Any:
    # The garbage collector cannot see a tensor's hooks. If the hook referenced `Passes`, which
    # references the tensor, neither would ever be freed. Hooks of modules keep `Passes` alive.
    alive = weakref.ref(passes)

    def take(param: nn.Parameter) -> None:
        grad, passes = get_grad(param), alive()
        if grad is None or passes is None:  # an autograd.Function returned no gradient
            return
        set_grad(param, None)
        unit = passes.units.units[index]
        passes.driver.gradient_ready(unit, unit.grads[number], position, grad)

    is_required = param.requires_grad
    param.requires_grad_(True)  # otherwise torch refuses the hook
    handle = param.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
    param.requires_grad_(is_required)
    return handle


def _part_hook(passes: Passes, unit: Unit, *, is_one_graph: bool) -> Any:
    index, ready = unit.index, passes.units.ready

    def gather(module: nn.Module, args: Any) -> None:
        # While torch.compile traces a graph around the module, hooks outside of it gather the unit.
        # The hook of a graph runs outside of it, where another thread's compilation sets the flag.
        if (is_one_graph or not torch.compiler.is_compiling()) and index not in ready:
            passes.forward.enter_part(unit)

    return gather
