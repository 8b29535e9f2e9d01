"""Ownership of a model's parameters by an engine, from ``build`` until the engine ends.

A rank that closes its engine may be one that failed, so it waits for no other. It cannot gather the
slices of others, and current values beside older ones would look like a model. Such parameters
therefore hold no value after `Ownership.close`, as at stage 3 between two uses.
`Ownership.leave_shards` gives this rank's slices to a caller that keeps them elsewhere, such as
DeepSpeed's ``zero.Init``.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from zero_core.comm.control import ControlGroup
from zero_core.core import access
from zero_core.core.params import FlatParams
from zero_core.errors import CollectiveError, ConfigError
from zero_core.layout.arithmetic import ParamSpec
from zero_core.object_methods import ObjectMethods
from zero_core.sharded.sharded_state import ShardedState

_log = logging.getLogger(__name__)


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
    """The parameters of one model and the hooks on it, as long as an engine owns them."""

    def __init__(self, state: ShardedState) -> None:
        """Prepare for the parameters of ``state``."""
        self._owner: weakref.ref[object] | None = None
        self._thread = threading.get_ident()
        self.state = state
        self.is_ended = False
        """Whether the engine has ended; the model may have other values since."""
        self.empty_entries_advice: str | None = None
        """Unless None, ``state_dict`` gives empty tensors for values that are not here, not an
        error. The advice ends the warning."""
        self._has_warned = False
        self.hooks: list[Removable] = []
        """Hooks on the model that are removed at the end, the last ones first."""
        _alive[:] = [ref for ref in _alive if ref() is not None]
        _alive.append(weakref.ref(self))

    def begin(self, owner: object) -> None:
        """Own the parameters for ``owner``, held weakly, until the end."""
        self._owner = weakref.ref(owner)

        def refuse(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            absent = self._absent(module) if self.empty_entries_advice is None else []
            if absent:
                raise RuntimeError(
                    f"{prefix}{absent[0]}: the module's parameters do not hold the current values "
                    "here: use engine.full_state_dict(), or state_dict() within "
                    f"{self.state.cures.read}"
                )

        def empty(module: nn.Module, entries: dict[str, Any], prefix: str, _: Any) -> None:
            advice = self.empty_entries_advice
            for name in [] if advice is None else self._absent(module):
                key = f"{prefix}{name}"
                if key not in entries:
                    continue
                if not self._has_warned and self.state.control.rank == 0:  # which writes files
                    text = "state_dict() has names without values, the first for %s: %s"
                    _log.warning(text, key, advice)
                self._has_warned = True
                whole = entries[key]
                entries[key] = torch.empty(0, dtype=whole.dtype, device=whole.device)

        for module in self.state.module.modules():
            self.hooks.append(module.register_state_dict_pre_hook(refuse))  # type: ignore[no-untyped-call]
            self.hooks.append(module.register_state_dict_post_hook(empty))  # type: ignore[no-untyped-call]

    def owner_of(self, param: nn.Parameter) -> object | None:
        if self._owner is None or self.name_of(param) is None:
            return None
        return self._owner()

    def name_of(self, param: nn.Parameter) -> str | None:
        return None if self.is_ended else self.state.param_names.get(id(param))

    def undo(self) -> None:
        """Remove all that was put on the model so far: of a failed build, or at the end."""
        self.is_ended = True
        with ExitStack() as stack:  # one that raises keeps none of the others
            while self.hooks:
                stack.callback(self.hooks.pop(0).remove)

    def dropped(self) -> None:
        """Close, as the owner was freed without an end.

        Another thread, which may be one that a close waits for, leaves it to `check_is_free`.
        """
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
                for values in self.state.params:
                    _leave_whole(values, self.state)
                return
            except Exception:  # such as a file that is gone
                _log.warning("an engine ended, and its values cannot be read", exc_info=True)
        for values in self.state.params:
            values.abandon()
        for module in self.state.module.modules():
            if _refuse_left_over not in module._state_dict_pre_hooks.values():
                module.register_state_dict_pre_hook(_refuse_left_over)  # type: ignore[no-untyped-call]

    def leave_shards(self) -> Iterator[LeftShard]:
        """End, on this rank alone. See `zero_core.Engine.leave_shards`."""
        if self.is_ended:
            return iter(())
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

    def allow_empty_entries(self, advice: str) -> None:
        """Have ``state_dict`` give empty tensors: see `zero_core.ShardedModel`."""
        self.empty_entries_advice = advice
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


def _save_opened(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    with access.opened(module._parameters.values()):  # what is not here is emptied afterwards
        type(module)._save_to_state_dict(module, *args, **kwargs)


_alive: list[weakref.ref[Ownership]] = []  # the newest last


def owner_of(param: nn.Parameter) -> object | None:
    """Return the engine that owns ``param``, the newest if there are several, or None."""
    alive = (ref() for ref in reversed(_alive))
    owners = (one.owner_of(param) for one in alive if one is not None)
    return next((owner for owner in owners if owner is not None), None)


def check_is_free(model: nn.Module) -> None:
    """Refuse a model with another engine's parameter. One that was freed is ended here."""
    for name, param in model.named_parameters():
        for ref in tuple(_alive):
            found = ref()
            if found is None or found._owner is None or found._owner() is not None:
                continue
            if found.name_of(param) is not None:  # its hooks are on the model still
                found.close()
        if owner_of(param) is not None:
            raise ConfigError(
                f"build(): {name} belongs to an engine already. Go on with that one, which "
                f"zero_core.engine_of(model.get_parameter({name!r})) returns; or give it up by its "
                "unwrap(), on every rank, and build then"
            )


@torch.no_grad()
def _leave_whole(values: FlatParams, state: ShardedState) -> None:
    """Make parameters views of the only rank's shard."""
    values.source.wait_update()
    shard = values.source.read().detach()
    if shard.untyped_storage().nbytes() < shard.nbytes:
        raise RuntimeError("they are offloaded: call reload_states() before close()")
    access.open_all(values.shown.read_params)
    for position, param in enumerate(values.params):
        spec = state.layout.params[values.segment.slots[position].param]
        param.data = spec.to_values(values.part_of(position, shard))


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
