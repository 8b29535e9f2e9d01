"""Checks that the model still has the parameters that the engine was built over.

[Note: what a model may not do after build()]
The engine keeps a parameter's values in memory of its own and its gradient hook on the object. It
does not track a parameter that is replaced, added or tied to another name later, nor one whose
memory is replaced (``module.double()``, ``param.data = ...``, ``param.set_()``): errors at the next
forward with gradients, or at the next step. What keeps the objects and their memory is allowed:
``requires_grad_``, ``module.to`` of the same device and dtype, in-place writes within `gathered`,
wrappers around modules, modules without parameters, `torch.func.functional_call`.

[Note: trainable and frozen]
A parameter is *trainable* if it is in a group of the optimizer when the engine is built, and not of
integers: it has a gradient, a master weight and optimizer state in the layout. Its
``requires_grad`` may be switched off and on between steps, on every rank alike: while it is off no
gradient comes, and a step leaves the parameter and its state alone, as torch's optimizers leave one
without ``.grad``. It keeps its memory, and travels with its unit as before.
Every other parameter is frozen for good: it has values alone, and unfreezing it is an error.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from zero_core._torch import outside_graphs
from zero_core.layout.arithmetic import Layout
from zero_core.layout.discovery import plain_name
from zero_core.object_methods import ObjectMethods
from zero_core.sharded.sharded_state import ShardedState

_log = logging.getLogger(__name__)
_FLATTEN = nn.RNNBase.flatten_parameters.__name__
_ADVICE = (
    "Write values within engine.gathered(modifier_rank=...); to change the model itself, end the "
    "engine by engine.unwrap() and build another one"
)


class ParamGuard:
    """Refuses what [Note: what a model may not do after build()] names, and unfreezing."""

    def __init__(self, state: ShardedState) -> None:
        """Remember the model's parameters and their places."""
        self._model = state.module
        self._values = state.params
        self._name_of_memory = names = state.param_names
        self._num_names = Counter(id(param) for param in _named(state.module).values())
        self._name_of = {key: name for key, name in names.items() if self._num_names[key]}
        trainable = {id(p) for v in state.params if v.segment.is_trainable for p in v.params}
        self._frozen = [p for p in state.module.parameters() if id(p) not in trainable]
        self._remember_places()

    def watch(self) -> Any:
        """Check before each forward of the model with gradients. Returns the hook's handle."""

        def hook(module: nn.Module, args: Any) -> None:
            if torch.is_grad_enabled():
                self.check(has_substitutes=True)

        return self._model.register_forward_pre_hook(outside_graphs(hook), prepend=True)

    def check(self, *, has_substitutes: bool = False) -> None:
        """Raise if the model has other parameters than at first, or one was moved or unfrozen."""
        # Called at each forward: passes over dictionaries in C that touch no entry.
        if (
            any(self._empty)
            or sum(map(len, self._places)) != len(self._entries)
            or not all(map(is_, chain.from_iterable(self._places), self._entries))
        ):
            self._check_names(has_substitutes=has_substitutes)
        for values in self._values:
            shown = values.shown
            if (position := shown.misplaced()) is not None:
                param = shown.params[position]
                expected = f"{shown.dtype_of(position)} on {values.device}"
                raise RuntimeError(
                    f"parameter {self._name_of_memory[id(param)]} was given other memory after "
                    f"build() ({param.dtype} on {param.device}, {expected} expected), as by "
                    "module.to(), module.double(), param.data = ... or param.set_(): the engine "
                    f"would not follow it. Cast and move a model before build(). {_ADVICE}"
                )
            if (written := shown.written) is not None:
                shown.written = None
                raise RuntimeError(shown.refusal(written, is_write=True))
        for param in self._frozen:
            if param.requires_grad:
                raise RuntimeError(
                    f"parameter {self._name_of[id(param)]} requires a gradient now, but was in no "
                    "optimizer group when the engine was built: nothing would update it. Freeze it "
                    "again; or build the engine while it requires a gradient (or with an optimizer "
                    "over it), and freeze it after build() until it is to be trained"
                )

    def _remember_places(self) -> None:
        modules = list(self._model.modules())
        dicts: list[dict[str, Any]] = [m._parameters for m in modules]
        dicts += [m._modules for m in modules]
        self._empty = [d for d in dicts if not d]
        self._places = [d.values() for d in dicts if d]  # they follow the dictionaries
        self._entries = list(chain.from_iterable(self._places))

    def _check_names(self, *, has_substitutes: bool) -> None:
        named = _named(self._model)
        known = set(self._name_of.values())
        for name, param in named.items():
            if id(param) not in self._name_of:
                if has_substitutes and not isinstance(param, nn.Parameter):
                    continue
                what = "was replaced" if plain_name(name) in known else "was added to the model"
                raise RuntimeError(
                    f"parameter {name} {what} after build(): nothing would train or save it. "
                    f"{_ADVICE}"
                )
        num_names = Counter(map(id, named.values()))
        for key, name in self._name_of.items():
            if num_names[key] > self._num_names[key]:
                raise RuntimeError(
                    f"parameter {name} was tied to a further place after build(), where it would "
                    f"not be gathered. {_ADVICE}"
                )
            if not num_names[key] and not has_substitutes:
                raise RuntimeError(
                    f"parameter {name} was removed from the model after build(): nothing would "
                    f"train it, and it would still be saved. {_ADVICE}"
                )
        if len(num_names) == len(self._name_of):
            self._remember_places()  # modules were wrapped, or ones without parameters changed


def fix_memory(model: nn.Module) -> ObjectMethods:
    """Keep recurrent modules from moving their weights to memory of cuDNN's, until `remove`.

    ``nn.RNNBase.flatten_parameters`` points them into a new buffer on a GPU, often in each forward.
    Without it cuDNN copies the weights at each call, and torch warns of that.
    """
    modules = [m for m in model.modules() if isinstance(m, nn.RNNBase)]
    return ObjectMethods(_FLATTEN, [(module, lambda: None) for module in modules])


def warn_frozen(layout: Layout, params: Sequence[Tensor]) -> None:
    """Warn of memory kept for parameters that are frozen for now."""
    found = [
        spec
        for spec, param in zip(layout.params, params, strict=True)
        if spec.is_trainable and not param.requires_grad
    ]
    if found:
        _log.warning(
            "%d parameters (%d elements; the first is %s) require no gradient but are in an "
            "optimizer group: memory is kept for their gradients, master weights and optimizer "
            "states, so that they can be unfrozen. If they never will be, leave them out of the "
            "optimizer",
            len(found),
            sum(spec.numel for spec in found),
            found[0].name,
        )


def _named(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))
