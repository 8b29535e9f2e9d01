"""Hooks on the model's modules and parameters that call the passes' driver.

[Note: the engine's hooks and others]
Hooks that others put on a unit's module (weight normalisation is one) may read its parameters. So a
unit is gathered before any of them and released after all of them: the engine's pre-forward hook is
the first, and its forward hook is moved behind those that came later, at each forward.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from zero_core._torch import (
    get_grad,
    is_in_backward,
    is_own_graph,
    outside_graphs,
    requires_grad,
    set_grad,
    unless_compiling,
)
from zero_core.core.passes import Passes
from zero_core.core.unit import Unit


def install(passes: Passes, modules: Sequence[nn.Module]) -> list[Any]:
    """Hook the units' ``modules`` (the model first) and trainable parameters.

    Returns handles, each with ``remove``.
    """
    handles: list[Any] = []
    for unit, module in zip(passes.units.units, modules, strict=True):
        if not unit.is_tail:  # its module is the model, which the root's hooks are on
            handles += _hook_unit(passes, unit, module)
        for number, grads in enumerate(unit.grads):
            for position, param in enumerate(grads.params):
                handles.append(_hook_gradient(passes, unit.index, number, position, param))
    # The modules that hold a unit's parameters, for when they are called by themselves: activation
    # checkpointing of a part of a block does that in backward, a model that calls
    # ``block.attention`` in its own forward. The units have the hooks of blocks' parts.
    for module in modules[0].modules():
        if isinstance(module, ParametrizationList):
            continue  # a read of the parametrized weight calls it, and a read gathers nothing
        own = passes.units_of(module, recurse=False)
        is_one_graph = False
        if is_own_graph(module):  # one graph with all its parts
            within = passes.units_of(module)
            if len(within) == 1:
                own, is_one_graph = within, True
        for unit in own:
            if module is not modules[unit.index]:
                hook = _part_hook(passes, unit)
                hook = outside_graphs(hook) if is_one_graph else unless_compiling(hook)
                if unit.is_block:
                    passes.units.part_hooks.add(module, hook)
                else:
                    handles.append(module.register_forward_pre_hook(hook, prepend=True))
    return [*handles, passes.units.part_hooks, passes]


def _hook_unit(passes: Passes, unit: Unit, module: nn.Module) -> list[RemovableHandle]:
    def release(module: nn.Module, args: Any, output: Any) -> None:
        if not is_in_backward():
            error = sys.exception() if output is None else None
            passes.driver.leave(unit, needs_grad=requires_grad(output), error=error)

    last = module.register_forward_hook(outside_graphs(release), always_call=True)

    def gather(module: nn.Module, args: Any) -> None:
        others = last.hooks_dict_ref()
        assert others is not None, "the module that is called holds its hooks"
        if next(reversed(others)) != last.id:
            others.move_to_end(last.id)
        if is_in_backward():  # activation checkpointing computes the block again
            passes.backward.enter_recompute(unit)
        else:
            passes.driver.enter(unit, module)

    return [module.register_forward_pre_hook(outside_graphs(gather), prepend=True), last]


def _hook_gradient(
    passes: Passes, index: int, number: int, position: int, param: nn.Parameter
) -> Any:
    # torch hides these hooks of a tensor from the garbage collector: what one holds is never freed
    # if it holds the tensor in turn. The hooks of modules keep the passes as long as the model.
    alive = weakref.ref(passes)

    def take(param: nn.Parameter) -> None:
        grad, passes = get_grad(param), alive()
        if grad is None or passes is None:  # an autograd.Function returned none for it
            return
        set_grad(param, None)
        unit = passes.units.units[index]
        passes.driver.gradient_ready(unit, unit.grads[number], position, grad)

    is_required = param.requires_grad
    param.requires_grad_(True)  # torch hooks no other; the hook stays when it is switched off
    handle = param.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
    param.requires_grad_(is_required)
    return handle


def _part_hook(passes: Passes, unit: Unit) -> Any:
    index, ready = unit.index, passes.units.ready

    def gather(module: nn.Module, args: Any) -> None:
        if index not in ready:
            passes.forward.enter_part(unit)

    return gather
