"""Offloading of an engine's device memory, and refusal of calls that need it.

[Note: emptied storages]
Each long-lived buffer is one storage with many views. To offload a buffer, its bytes are copied to
the host and the storage is resized to zero. Reloading reverses this. Views stay the same objects,
and only addresses change. Scratch memory is not copied. Memory that other ranks map cannot be
resized and is not offloaded.

Reading an emptied storage would crash. So offloaded parameters are placeholders. While parameters
or scratch memory are offloaded, temporary hooks make every module of the model refuse a forward.
While these or gradients are offloaded, no backward may begin. At stages 0 to 2, offloading
parameters increments their autograd version counters, so torch refuses the backward of an earlier
forward, even after reloading.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero_core._torch import storage_of
from zero_core.core.extension import Extensions
from zero_core.core.passes import Passes
from zero_core.layout.arithmetic import Layout
from zero_core.object_methods import ObjectMethods
from zero_core.protocols import DeviceMemory
from zero_core.sharded.edits import Edits
from zero_core.sharded.memory import Memory
from zero_core.sharded.sharded_state import ShardedState

_log = logging.getLogger(__name__)
_FLATTEN = nn.RNNBase.flatten_parameters.__name__


class StatePart(StrEnum):
    """Part of an engine's device memory."""

    PARAMETERS = "parameters"
    """Parameters or their shards. In fp32 they are the master weights."""
    MASTER_WEIGHTS = "master_weights"
    OPTIMIZER_STATES = "optimizer_states"
    GRADIENTS = "gradients"
    """Reduced gradients and sums of micro-steps."""
    BUFFERS = "buffers"
    """Scratch memory, which holds nothing between two steps."""


ALL_PARTS = frozenset(StatePart)
NO_PARTS: frozenset[StatePart] = frozenset()
FORWARD_PARTS = frozenset({StatePart.PARAMETERS, StatePart.BUFFERS})
BACKWARD_PARTS = FORWARD_PARTS | {StatePart.GRADIENTS}


class _HostCopy:
    """A storage and, if ``is_kept``, a copy of its bytes on the host."""

    def __init__(self, storage: torch.UntypedStorage, *, is_kept: bool, pin_memory: bool) -> None:
        self.storage = storage
        self._nbytes = storage.nbytes()
        self._host: Tensor | None = None
        if is_kept:
            self._host = torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=pin_memory)
            held = self._bytes()
            self._host.copy_(held, non_blocking=pin_memory)
            if held.device.type != "cpu":  # record_stream delays reuse of the memory
                held.record_stream(torch.accelerator.current_stream(held.device))

    def restore(self) -> None:
        """Allocate the memory again and start to copy the bytes back."""
        self.storage.resize_(self._nbytes)
        if self._host is not None:
            self._bytes().copy_(self._host, non_blocking=self._host.is_pinned())

    def _bytes(self) -> Tensor:
        found = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return found.set_(self.storage, 0, (self._nbytes,), (1,))


class DeviceStates:
    """Offloading of an engine's device memory, and refusal of calls that need offloaded parts."""

    def __init__(
        self,
        memory: Memory,
        passes: Passes,
        state: ShardedState,
        holders: Sequence[object],
        edits: Edits,
        extensions: Extensions,
    ) -> None:
        """``holders``: objects that may have further device memory."""
        self.edits = edits
        self._extensions = extensions
        self._memory = memory
        self._passes = passes
        self._state = state
        self._holders = [holder for holder in holders if isinstance(holder, DeviceMemory)]
        self._away: dict[StatePart, list[_HostCopy]] = {}
        self._refusals: list[RemovableHandle] = []
        self.ended_by = ""  # name of the call that ended the engine
        self.refuses = False  # whether parts are offloaded or the engine has ended

    @property
    def offloaded(self) -> frozenset[StatePart]:
        """Parts that are on the host."""
        return frozenset(self._away)

    def before_write(self) -> None:
        """Notify extensions that states are about to be read or written outside of a step."""
        for follow in self._extensions.before_write:
            follow()

    def check(self, what: str, needed: frozenset[StatePart] = ALL_PARTS) -> None:
        """Raise as `check_here`, or if an interrupted call left values half-updated."""
        self._state.control.place.check_finished(what)
        self.check_here(what, needed)

    def check_here(self, what: str, needed: frozenset[StatePart] = ALL_PARTS) -> None:
        """Raise if ``what`` needs an offloaded part or the engine has ended.

        A call that needs all parts also waits for pending exchanges and calls `Edits.find`.
        """
        if self.ended_by:
            raise RuntimeError(
                f"rank {self._state.control.rank}: {what} of an engine that has ended, by "
                f"{self.ended_by}: its model may have other values and another engine since. Go "
                "on with the model as it is, or build another engine"
            )
        if self._away and needed & self._away.keys():
            raise RuntimeError(self._explain(what, needed))
        if needed is ALL_PARTS:
            # On all ranks the exchanges of ``what`` must follow those of the last publication.
            self._passes.units.drain()
            self.edits.find()

    def end(self, call: str) -> None:
        """Refuse every later call, because ``call`` has ended the engine."""
        self.ended_by = self.ended_by or call
        self.refuses = True

    def check_states(self, what: str) -> None:
        """Call `check` before a read of master weights, and apply pending edits to them."""
        self.check(what)
        if self.edits.pending:
            self.before_write()
            self.edits.apply()

    def _explain(self, what: str, needed: frozenset[StatePart]) -> str:
        away = ", ".join(sorted(needed & self._away.keys()))
        return (
            f"rank {self._state.control.rank}: {what} while {away} are offloaded: call "
            "reload_states() first, on every rank, when the device has room for them"
        )

    def _settle(self) -> None:
        """Release all units, and wait until the gradients' memory is unused."""
        passes = self._passes
        passes.forward.end_interrupted()
        if passes.is_running or passes.units.has_full_params:
            raise RuntimeError(
                f"rank {self._state.control.rank}: offload_states() within a forward, a backward "
                "or gathered(): call it between two steps"
            )
        if passes.backward.is_open:
            passes.backward.drop_unended()
        passes.units.release_all()
        for grads in passes.backward.grads:
            grads.synchronize()

    @torch.no_grad()
    def offload(
        self, parts: Iterable[str], *, keeps_gradients: bool, pin_memory: bool, non_blocking: bool
    ) -> None:
        """Implement `zero_core.Engine.offload_states`.

        ``keeps_gradients``: whether gradients are copied, because a step still needs them.
        """
        wanted = [part for part in StatePart if part in set(parts) - self._away.keys()]
        if not wanted:
            return
        device = self._state.device
        is_accelerator = device.type != "cpu"
        self.before_write()
        self._settle()
        self._state.tier.wait_params(0, max((p.stop for p in self._state.pieces), default=0))
        self._state.quiesce()
        if is_accelerator:
            torch.accelerator.synchronize(device)  # other streams may use the memory
        # Make all copies before emptying the first storage, so a failed allocation changes nothing.
        copies: dict[StatePart, list[_HostCopy]] = {part: [] for part in wanted}
        held = [holder.device_tensors() for holder in (self._memory, *self._holders)]
        seen: set[int] = set()  # a storage used by several parts belongs to the first
        for part in StatePart:
            is_kept = keeps_gradients if part is StatePart.GRADIENTS else part != StatePart.BUFFERS
            for tensor in (tensor for one in held for tensor in one.get(part, ())):
                storage = tensor.untyped_storage()
                is_new = storage_of(tensor) not in seen
                seen.add(storage_of(tensor))
                is_here = storage.device.type == device.type and storage.nbytes() > 0
                if part in copies and is_new and is_here and storage.resizable():
                    pins = pin_memory and is_accelerator
                    copies[part].append(_HostCopy(storage, is_kept=is_kept, pin_memory=pins))
        if StatePart.PARAMETERS in wanted:
            self._passes.units.vacate()
        self._away |= copies
        self.refuses = True
        for copy in (copy for part in copies.values() for copy in part):
            copy.storage.resize_(0)
        if StatePart.BUFFERS in wanted:
            self._memory.free_buffers()
        self._memory.forget_views()
        if not self._refusals and FORWARD_PARTS & self._away.keys():

            def refuse(module: nn.Module, args: Any) -> None:
                self.check("a forward", FORWARD_PARTS)

            self._refusals = [
                module.register_forward_pre_hook(refuse, prepend=True)
                for module in self._state.module.modules()
            ]
        if BACKWARD_PARTS & self._away.keys():
            self._passes.backward.why_refused = self._explain("a backward", BACKWARD_PARTS)
        if is_accelerator and not non_blocking:
            torch.accelerator.synchronize(device)
            torch.accelerator.empty_cache()

    @torch.no_grad()
    def reload(self, *, non_blocking: bool) -> None:
        if not self._away:
            return
        for part in self._away.values():
            while part:  # if a restore fails, all parts count as offloaded
                part[-1].restore()
                part.pop()
        device = self._state.device
        if StatePart.BUFFERS in self._away and device.type != "cpu":
            self._memory.reserve_buffers()
        self._away.clear()
        self.refuses = bool(self.ended_by)
        self._memory.forget_views()
        for values in self._state.params:
            values.reoccupy()
        for refusal in self._refusals:
            refusal.remove()
        self._refusals.clear()
        self._passes.backward.why_refused = None
        if device.type != "cpu" and not non_blocking:
            torch.accelerator.synchronize(device)


def fix_memory(model: nn.Module) -> ObjectMethods:
    """Stop recurrent modules from moving their weights to cuDNN's memory, until `remove`.

    On a GPU ``nn.RNNBase.flatten_parameters`` moves the weights into a new buffer, often in each
    forward. For weights in other memory cuDNN makes a copy at each call, and torch logs a warning.
    """
    modules = [m for m in model.modules() if isinstance(m, nn.RNNBase)]
    return ObjectMethods(_FLATTEN, [(module, lambda: None) for module in modules])


def warn_frozen(layout: Layout, params: Sequence[Tensor]) -> None:
    """Warn about memory reserved for parameters that are currently frozen."""
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
