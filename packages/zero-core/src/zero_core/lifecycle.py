"""Ownership of a model's parameters by an engine, from ``build`` until the engine ends.

A rank may close its engine because of a failure, so closing needs no collective. (On an accelerator
it may wait for other ranks: `zero_core.comm.watch.Watch.leave`.) After `Ownership.close`, a
parameter whose whole current value is not on this rank has no value, because a mix of current and
stale values would look like a valid model.
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
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.serialization import DEFAULT_PROTOCOL
from torch.utils.hooks import RemovableHandle

from zero_core.comm.control import ControlGroup
from zero_core.core import access
from zero_core.errors import CollectiveError, ConfigError
from zero_core.layout.arithmetic import ParamSpec
from zero_core.object_methods import ObjectMethods, SuspendableHooks
from zero_core.sharded.sharded_state import ShardedState

_log = logging.getLogger(__name__)


class LeftShard(NamedTuple):
    """This rank's elements of one parameter of an engine that has ended."""

    param: Tensor  # the parameter, or a component of a quantized one
    spec: ParamSpec  # ``spec.to_values`` restores the value from all elements
    control: ControlGroup  # group of all ranks of the engine
    spans: list[tuple[int, int]]  # range [start, stop) of each rank's elements, by rank
    values: Tensor  # this rank's elements, 1-D: bytes if ``spec.is_opaque``


class Removable(Protocol):
    """Handle of a hook, or another object that is removed when an engine ends."""

    def remove(self) -> None: ...


class Ownership:
    """Parameters of one model and the hooks on the model, while an engine owns them."""

    _is_exiting = staticmethod(sys.is_finalizing)  # late at exit, the module's ``sys`` is None

    def __init__(self, state: ShardedState) -> None:
        self.owner: weakref.ref[object] | None = None  # the engine, set by `begin`
        self._thread = threading.get_ident()
        self._allows_empty = False
        self._advice = ""  # argument of `allow_empty_entries`
        self.state = state
        self.is_ended = False  # if True, another engine may own the model
        self.hooks: list[Removable] = []  # removed in reverse order when the engine ends
        _alive[:] = [ref for ref in _alive if ref() is not None]
        _alive.append(weakref.ref(self))

    def begin(self, owner: object) -> None:
        """Set the owner, weakly referenced. ``state_dict`` then raises if values are absent."""
        self.owner = weakref.ref(owner)

        def refuse(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            if not self._allows_empty and (absent := self._absent(module)):
                raise RuntimeError(
                    f"{prefix}{absent[0]}: the module's parameters do not hold the current values "
                    "here: use engine.full_state_dict(), or state_dict() within "
                    f"{self.state.cures.read}"
                )

        for module in self.state.module.modules():
            self.hooks.append(module.register_state_dict_pre_hook(refuse))  # type: ignore[no-untyped-call]

    def allow_empty_entries(self, advice: str) -> None:
        self._advice = advice
        if self._allows_empty:
            return
        modules = list(self.state.module.modules())
        has_warned = self.state.control.rank != 0  # only rank 0 warns

        def save(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            # `empty` replaces the entries whose value is not on this rank.
            with access.opened(module._parameters.values()):
                type(module)._save_to_state_dict(module, *args, **kwargs)

        def empty(module: nn.Module, entries: dict[str, Any], prefix: str, _: Any) -> None:
            nonlocal has_warned
            for key in (f"{prefix}{name}" for name in self._absent(module)):
                if key not in entries:
                    continue
                if not has_warned:
                    text = "state_dict() has names without values, the first for %s: %s"
                    _log.warning(text, key, self._advice)
                has_warned, whole = True, entries[key]
                entries[key] = torch.empty(0, dtype=whole.dtype, device=whole.device)

        for module in modules:
            self.hooks.append(module.register_state_dict_post_hook(empty))  # type: ignore[no-untyped-call]
        name = nn.Module._save_to_state_dict.__name__
        self.hooks.append(ObjectMethods(name, [(m, partial(save, m)) for m in modules]))
        self._allows_empty = True

    def _absent(self, module: nn.Module) -> list[str]:
        """Return names of ``module``'s own parameters whose current value is not on this rank."""
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
        """Remove all hooks from the model, which another engine may then own."""
        self.is_ended = True
        with ExitStack() as stack:  # removes the other hooks even if one raises
            while self.hooks:
                stack.callback(self.hooks.pop(0).remove)

    def dropped(self) -> None:
        """Call `close` when the engine is garbage-collected, if that is safe here."""
        # close() could deadlock on a thread other than the one that built the engine. In that case
        # `check_is_free` calls it when an engine is next built on the model.
        if not self._is_exiting() and self._thread == threading.get_ident():
            try:
                self.close()
            except Exception:  # exceptions in a finalizer reach no caller
                _log.warning("an engine was dropped whose step had failed", exc_info=True)

    def close(self) -> None:
        """End the ownership on this rank. Reads of values absent on this rank then raise."""
        if self.is_ended:
            return
        self._end()
        if not self._has_stale_values():
            return
        if self.state.control.world_size == 1:
            try:
                for left in self._local_shards():
                    left.param.data = left.spec.to_values(left.values)
                return
            except Exception:  # the parameters are offloaded, or cannot be read from their file
                _log.warning("an engine ended, and its values cannot be read", exc_info=True)
        for values in self.state.params:
            values.abandon()
        for module in self.state.module.modules():
            if _refuse_left_over not in module._state_dict_pre_hooks.values():
                module.register_state_dict_pre_hook(_refuse_left_over)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _local_shards(self) -> Iterator[LeftShard]:
        """Yield this rank's elements of each parameter, whose ``data`` may then be replaced."""
        control, params = self.state.control, self.state.layout.params
        for flat in self.state.params:
            flat.source.wait_update()
            shard = flat.source.read().detach()
            if shard.untyped_storage().nbytes() < shard.nbytes:
                raise RuntimeError("they are offloaded: call reload_states() before close()")
            access.open_all(flat.shown.read_params)
            ranges = [flat.segment.shard_range(rank) for rank in range(control.world_size)]
            for position, param in enumerate(flat.params):
                slot, values = flat.segment.slots[position], flat.part_of(position, shard)
                spans = [slot.common(*each) for each in ranges]
                yield LeftShard(param, params[slot.param], control, spans, values)

    def leave_shards(self) -> Iterator[LeftShard]:
        self._end()
        is_whole = not self._has_stale_values() and all(p.is_kept for p in self.state.params)
        return iter(()) if is_whole else self._local_shards()

    def _has_stale_values(self) -> bool:
        """Whether a current value is missing on this rank, after a wait for pending exchanges."""
        try:
            self.state.refresh()
            return not all(values.is_current for values in self.state.params)
        except CollectiveError as error:
            _log.warning("%s: the parameters whose values it carried hold none now", error)
            return True

    def leave_values(self, full: Mapping[str, Tensor]) -> None:
        """End the ownership, and set parameters to ``full``, by name. Move buffers to the CPU."""
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
        finally:  # even if the tier raises, the model is free for another engine
            self.undo()


_alive: list[weakref.ref[Ownership]] = []  # oldest first


def owner_of(param: nn.Parameter) -> object | None:
    """Return the engine that owns ``param``, the newest of several, or None."""
    for one in filter(None, (ref() for ref in reversed(_alive))):
        owner = None if one.owner is None or one.name_of(param) is None else one.owner()
        if owner is not None:
            return owner
    return None


def check_is_free(model: nn.Module) -> None:
    """Raise ConfigError if an engine owns a parameter of ``model``.

    Before that, closes engines of the model that were garbage-collected without being closed.
    """
    for name, param in model.named_parameters():
        for one in filter(None, [ref() for ref in _alive]):
            is_freed = one.owner is not None and one.owner() is None
            if is_freed and one.name_of(param) is not None:
                one.close()
        if owner_of(param) is not None:
            raise ConfigError(
                f"build(): {name} belongs to an engine already. Go on with that one, which "
                f"zero_core.engine_of(model.get_parameter({name!r})) returns; or give it up by its "
                "unwrap(), on every rank, and build then"
            )


def _refuse_left_over(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    for name, param in module._parameters.items():
        if param is not None and access.is_refused(param) and owner_of(param) is None:
            raise RuntimeError(
                f"{prefix}{name} holds no value: it went with an engine that was closed or "
                "dropped. End one with engine.unwrap()"
            )


class EngineParameter(nn.Parameter):
    """Parameter of an engine. A deep copy of it is a plain ``nn.Parameter``."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        found: nn.Parameter = memo[id(self)]
        return found


class ModelCopies:
    """Refuses pickle, and removes an engine's hooks while `copy.deepcopy` copies a module.

    A copy with these hooks would gather parameters for the engine.
    """

    engine: object = None  # keeps the engine alive as long as its model, if set

    def __init__(self, state: ShardedState, *handles: Sequence[Any]) -> None:
        self._state = state
        self._handles = handles
        modules = list(state.module.modules())
        # copy.deepcopy and pickle look these up on an object.
        copies = [(module, partial(self._copy, module)) for module in modules]
        reduces = [(module, partial(self._reduce, module)) for module in modules]
        methods = ("__deepcopy__", copies), ("__reduce_ex__", reduces)
        self._methods = [ObjectMethods(name, replaced) for name, replaced in methods]

    def remove(self) -> None:
        while self._methods:  # these refer to this object, which would be a cycle
            self._methods.pop().remove()

    @staticmethod
    def refuse_pickle(*_: object) -> NoReturn:
        raise TypeError(
            "an engine cannot be copied or pickled, nor its model be pickled (torch.save): values "
            "are sharded over ranks. Copy the model by copy.deepcopy(engine.module) within "
            "engine.gathered(); keep a training by engine.save_checkpoint(), and weights by "
            "engine.full_state_dict()"
        )

    def _reduce(self, module: nn.Module, protocol: int) -> Any:
        if protocol == DEFAULT_PROTOCOL:  # that of torch.save; copy.copy has another one
            self.refuse_pickle()
        return object.__reduce_ex__(module, protocol)

    def _copy(self, module: nn.Module, memo: dict[int, Any]) -> nn.Module:
        for param in module.parameters():
            name = self._state.param_names.get(id(param))
            if name is not None and not self._state.holds_value(param):
                raise RuntimeError(
                    f"parameter {name} does not hold its current values here, so that a copy of "
                    f"the module would not either: copy within {self._state.cures.read}, on every "
                    "rank"
                )
        handles: list[Any] = []
        for found in (found for some in self._handles for found in some):
            handles += found.handles if isinstance(found, SuspendableHooks) else [found]
        methods = [h for h in (*handles, *self._methods) if isinstance(h, ObjectMethods)]
        hooks = [handle for handle in handles if isinstance(handle, RemovableHandle)]
        numbers, tables = {hook.id for hook in hooks}, [hook.hooks_dict_ref() for hook in hooks]
        found_in = {id(table): table for table in tables if table is not None}
        before = [(table, list(table.items())) for table in found_in.values()]
        try:
            for table, items in before:
                table.clear()
                table.update(item for item in items if item[0] not in numbers)
            for method in reversed(methods):  # `ObjectMethods.remove` needs this order
                method.remove()
            return copy.deepcopy(module, memo)
        finally:
            for method in methods:
                method.attach()
            for table, items in before:  # restore the original order of hooks
                table.clear()
                table.update(items)
