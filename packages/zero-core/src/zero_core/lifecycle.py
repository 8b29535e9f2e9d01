"""Ownership of a model's parameters by an engine, from ``build`` until the engine ends.

A rank that closes its engine may be one that failed, so it waits for no other and cannot gather
their slices. Parameters of which others have a part hold no value after `Ownership.close`, as
current values beside older ones would look like a model.

[Note: copies of a model]
The engine's hooks are in the modules' own dictionaries. With them a copy would gather on behalf of
the engine, so they are taken off while `copy.deepcopy` runs.
"""

from __future__ import annotations

import copy
import logging
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero_core.comm.control import ControlGroup
from zero_core.core import access
from zero_core.core.params import FlatParams
from zero_core.errors import CollectiveError, ConfigError
from zero_core.layout.arithmetic import ParamSpec
from zero_core.object_methods import ObjectMethods, SuspendableHooks
from zero_core.sharded.sharded_state import ShardedState

_log = logging.getLogger(__name__)
_KEY = "__deepcopy__"  # looked up on the object by `copy.deepcopy`


class LeftShard(NamedTuple):
    """This rank's elements of one parameter of an engine that has ended."""

    param: Tensor  # the parameter, or a component of a quantized one
    spec: ParamSpec  # its form: ``spec.to_values`` makes the value of all elements
    control: ControlGroup  # the ranks that share it
    spans: list[tuple[int, int]]  # which of its elements each rank has; they do not overlap
    values: Tensor  # this rank's, in the engine's memory: bytes if ``spec.is_opaque``


class Removable(Protocol):
    """The handle of a hook."""

    def remove(self) -> None: ...


class Ownership:
    """The parameters of one model and the hooks on it, as long as an engine owns them.

    Attributes:
        owner: the engine, once it has begun.
        is_ended: whether the engine has ended; the model may have other values since.
        hooks: on the model, removed at the end, the last ones first.
    """

    def __init__(self, state: ShardedState) -> None:
        self.owner: weakref.ref[object] | None = None
        self._thread = threading.get_ident()
        self._advice: str | None = None  # of `allow_empty_entries`
        self._has_warned = False
        self.state = state
        self.is_ended = False
        self.hooks: list[Removable] = []
        _alive[:] = [ref for ref in _alive if ref() is not None]
        _alive.append(weakref.ref(self))

    def begin(self, owner: object) -> None:
        """Own the parameters for ``owner``, held weakly, until the end."""
        self.owner = weakref.ref(owner)

        def refuse(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            if self._advice is None and (absent := self._absent(module)):
                raise RuntimeError(
                    f"{prefix}{absent[0]}: the module's parameters do not hold the current values "
                    "here: use engine.full_state_dict(), or state_dict() within "
                    f"{self.state.cures.read}"
                )

        def empty(module: nn.Module, entries: dict[str, Any], prefix: str, _: Any) -> None:
            absent = [] if self._advice is None else self._absent(module)
            for key in (f"{prefix}{name}" for name in absent):
                if key not in entries:
                    continue
                if not self._has_warned and self.state.control.rank == 0:  # which writes files
                    text = "state_dict() has names without values, the first for %s: %s"
                    _log.warning(text, key, self._advice)
                self._has_warned = True
                whole = entries[key]
                entries[key] = torch.empty(0, dtype=whole.dtype, device=whole.device)

        for module in self.state.module.modules():
            self.hooks.append(module.register_state_dict_pre_hook(refuse))  # type: ignore[no-untyped-call]
            self.hooks.append(module.register_state_dict_post_hook(empty))  # type: ignore[no-untyped-call]

    def allow_empty_entries(self, advice: str) -> None:
        """Have ``state_dict`` give empty tensors: see `zero_core.ShardedModel`."""
        self._advice = advice
        modules = list(self.state.module.modules())
        name = nn.Module._save_to_state_dict.__name__
        self.hooks.append(ObjectMethods(name, [(m, partial(_save_opened, m)) for m in modules]))

    def _absent(self, module: nn.Module) -> list[str]:
        """Return the names of ``module``'s own parameters whose current value is not here."""
        return [
            name
            for name, param in module._parameters.items()
            if param is not None
            and self.name_of(param) is not None
            and not self.state.holds_value(param)
        ]

    def name_of(self, param: nn.Parameter) -> str | None:
        return None if self.is_ended else self.state.param_names.get(id(param))

    def undo(self) -> None:
        """Remove all that was put on the model so far: of a failed build, or at the end."""
        self.is_ended = True
        with ExitStack() as stack:  # one that raises keeps none of the others
            while self.hooks:
                stack.callback(self.hooks.pop(0).remove)

    def dropped(self) -> None:
        """Close, as the owner was freed without an end."""
        # Another thread, which may be one that a close waits for, leaves it to `check_is_free`.
        if self._thread == threading.get_ident() and not sys.is_finalizing():
            try:
                self.close()
            except Exception:  # nobody catches what is raised while an object is freed
                _log.warning("an engine was dropped whose step had failed", exc_info=True)

    def close(self) -> None:
        """End, on this rank alone. Parameters hold no value then of which others have a part."""
        if self.is_ended:
            return
        self._end()
        if not self._has_stale_values():
            return
        if self.state.control.world_size == 1:
            try:
                self._leave_whole()
                return
            except Exception:  # such as a file that is gone
                _log.warning("an engine ended, and its values cannot be read", exc_info=True)
        for values in self.state.params:
            values.abandon()
        for module in self.state.module.modules():
            if _refuse_left_over not in module._state_dict_pre_hooks.values():
                module.register_state_dict_pre_hook(_refuse_left_over)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _leave_whole(self) -> None:
        """Make parameters views of the only rank's shards."""
        for values in self.state.params:
            values.source.wait_update()
            shard = values.source.read().detach()
            if shard.untyped_storage().nbytes() < shard.nbytes:
                raise RuntimeError("they are offloaded: call reload_states() before close()")
            access.open_all(values.shown.read_params)
            for position, param in enumerate(values.params):
                spec = self.state.layout.params[values.segment.slots[position].param]
                param.data = spec.to_values(values.part_of(position, shard))

    def leave_shards(self) -> Iterator[LeftShard]:
        """End, on this rank alone. See `zero_core.Engine.leave_shards`."""
        self._end()
        values = self.state.params
        if not self._has_stale_values() and all(v.is_kept for v in values):
            return iter(())
        return (shard for v in values for shard in _local_shards(v, self.state))

    def _has_stale_values(self) -> bool:
        """Whether values are missing here, or their exchange has failed."""
        try:
            self.state.refresh()
            return not all(values.is_current for values in self.state.params)
        except CollectiveError as error:
            _log.warning("%s: the parameters whose values it carried hold none now", error)
            return True

    def leave_values(self, full: Mapping[str, Tensor]) -> None:
        """End with ``full`` values by the layout's names in parameters, buffers on the CPU."""
        self._end()
        names = self.state.param_names
        for flat in self.state.params:
            access.open_all(flat.shown.read_params)
            for param in flat.params:
                param.data = full[names[id(param)]]
        for part in self.state.module.modules():
            for name, buffer in part._buffers.items():
                part._buffers[name] = None if buffer is None else buffer.cpu()

    def _end(self) -> None:
        state = self.state
        try:
            state.tier.wait_params(0, max((p.stop for p in state.pieces), default=0))
        finally:  # a tier whose step failed raises: the model is free for another engine
            self.undo()


def _save_opened(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    with access.opened(module._parameters.values()):  # what is not here is emptied afterwards
        type(module)._save_to_state_dict(module, *args, **kwargs)


_alive: list[weakref.ref[Ownership]] = []  # the newest last


def owner_of(param: nn.Parameter) -> object | None:
    """Return the engine that owns ``param``, the newest if there are several, or None."""
    for one in filter(None, (ref() for ref in reversed(_alive))):
        owner = None if one.owner is None or one.name_of(param) is None else one.owner()
        if owner is not None:
            return owner
    return None


def check_is_free(model: nn.Module) -> None:
    """Refuse a model with another engine's parameter. One that was freed is ended here."""
    for name, param in model.named_parameters():
        for one in filter(None, [ref() for ref in _alive]):
            is_freed = one.owner is not None and one.owner() is None
            if is_freed and one.name_of(param) is not None:
                one.close()  # its hooks are on the model still
        if owner_of(param) is not None:
            raise ConfigError(
                f"build(): {name} belongs to an engine already. Go on with that one, which "
                f"zero_core.engine_of(model.get_parameter({name!r})) returns; or give it up by its "
                "unwrap(), on every rank, and build then"
            )


@torch.no_grad()
def _local_shards(values: FlatParams, state: ShardedState) -> Iterator[LeftShard]:
    segment, control = values.segment, state.control
    access.open_all(values.shown.read_params)  # for the caller, who gives them values
    shard = values.source.read().detach()
    ranges = [segment.shard_range(rank) for rank in range(control.world_size)]
    for position, param in enumerate(values.params):
        slot = segment.slots[position]
        spans = [slot.common(*each) for each in ranges]
        spec = state.layout.params[slot.param]
        yield LeftShard(param, spec, control, spans, values.part_of(position, shard))


def _refuse_left_over(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    for name, param in module._parameters.items():
        if param is not None and access.is_refused(param) and owner_of(param) is None:
            raise RuntimeError(
                f"{prefix}{name} holds no value: it went with an engine that was closed or "
                "dropped. End one with engine.unwrap()"
            )


class EngineParameter(nn.Parameter):
    """Base of the classes that parameters have while they belong to an engine."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a parameter of torch's own class, which belongs to no engine."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        found: nn.Parameter = memo[id(self)]
        return found


class ModelCopies:
    """Has `copy.deepcopy` of a module make a plain copy, or refuse to where values are missing.

    See [Note: copies of a model].
    """

    engine: object = None  # lives as long as the model, and not as its copies

    def __init__(self, state: ShardedState, *handles: Sequence[Any]) -> None:
        """Replace copying by the model's modules. ``handles``: lists of the engine's on them."""
        self._state = state
        self._handles = handles
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
