"""Copies of the engine's model, and of its parts, that are free of the engine.

The engine's hooks are in the modules' own dictionaries. With them a copy would gather on behalf of
the engine, so they are taken off while `copy.deepcopy` runs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from zero_core.object_methods import ObjectMethods, SuspendableHooks
from zero_core.sharded.sharded_state import ShardedState

_KEY = "__deepcopy__"  # looked up on the object by `copy.deepcopy`


class EngineParameter(nn.Parameter):
    """Base of the classes that parameters have while they belong to an engine."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a parameter of torch's own class, which belongs to no engine."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        found: nn.Parameter = memo[id(self)]
        return found


class ModelCopies:
    """Has `copy.deepcopy` of a module make a plain copy, or refuse to where values are missing."""

    engine: object = None  # lives as long as the model, and not as its copies

    def __init__(self, state: ShardedState, handles: Sequence[Sequence[Any]]) -> None:
        """Replace copying by the model's modules. ``handles``: lists of the engine's on them."""
        self._state = state
        self._handles = tuple(handles)
        self._modules = list(state.module.modules())
        self._attach()

    def remove(self) -> None:
        for module in self._modules:
            vars(module).pop(_KEY, None)

    def _attach(self) -> None:
        for module in self._modules:  # not by setattr: compiled modules pass it on
            vars(module)[_KEY] = partial(self._copy, module)

    def _copy(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        self._state.refresh()
        for param in module.parameters():
            places = self._state.places_of.get(id(param), ())
            if not all(flat.has_values_of(position) for flat, position in places):
                name = self._state.param_names[id(param)]
                raise RuntimeError(
                    f"parameter {name} does not hold its current values here, so "
                    f"that a copy of the module would not either: copy within "
                    f"{self._state.cures.read}, on every rank"
                )
        handles: list[Any] = []
        for found in (found for some in self._handles for found in some):
            handles += found.handles if isinstance(found, SuspendableHooks) else [found]
        methods = [handle for handle in handles if isinstance(handle, ObjectMethods)]
        dicts = {id(d): d for d in map(_dict_of, handles) if d is not None}
        before = [(d, list(d.items())) for d in dicts.values()]
        self.remove()
        try:
            for handle in handles:
                if (own := _dict_of(handle)) is not None:
                    own.pop(handle.id, None)
            for method in reversed(methods):  # the last that was replaced first
                method.remove()
            return copy.deepcopy(module, memo)
        finally:
            for method in methods:
                method.attach()
            for own, items in before:  # in the order that they had
                own.clear()
                own.update(items)
            self._attach()


def _dict_of(handle: Any) -> dict[int, Any] | None:
    """The dictionary that a hook stands in, while that is there."""
    return handle.hooks_dict_ref() if isinstance(handle, RemovableHandle) else None
