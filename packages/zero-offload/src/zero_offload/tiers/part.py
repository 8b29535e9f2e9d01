"""Part of a flat space that one tier holds, and migration of its state to another tier.

State migrates a block at a time. Only the StateTier's own calls are used, so that it can migrate
between any two tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from zero_offload.flat.geometry import Geometry, Intervals
from zero_offload.protocols import (
    ChangeWatcher,
    DeviceMemory,
    ReservingTier,
    SnapshotTier,
    StateTier,
)
from zero_offload.rules.rule import MASTER
from zero_offload.tiers.flat_tier import FlatTier, HostTier, TierReport
from zero_offload.transfers.mover import Release

_SQUARED_NUMEL = 1 << 24
"""Elements whose squares are summed at once, because torch may convert them to float64."""


@dataclass(frozen=True, slots=True)
class PartReport:
    """Sorted ``(start, stop)`` spans of one part, and its tier's report: None of a foreign tier."""

    is_host: bool
    spans: tuple[tuple[int, int], ...]
    tier: TierReport | None


@dataclass(eq=False)
class Part:
    """A tier over some elements of a flat space.

    Attributes:
        tier: has coordinates of its own, `Intervals.local`.
        geometry: its flat space.
        share: the elements.
        local: the tier's piece indices by those of the whole space.
        is_host: whether the tier is the host's, which updates in the background.
    """

    is_host: ClassVar[bool]
    tier: StateTier
    geometry: Geometry
    share: Intervals
    local: Mapping[int, tuple[int, ...]]

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        """Overwrite a state. Padding alone has no optimizer and no states but master weights."""
        if self.local or name == MASTER:
            self.tier.write_state(name, start, values)

    def check_states(self, names: Collection[str], scalars: Sequence[Mapping[str, float]]) -> None:
        """Refuse what could not be written of the whole space's pieces that are here."""
        own = {index: piece for piece, indices in self.local.items() for index in indices}
        self.tier.check_states(
            names if own else (), [scalars[own[index]] for index in range(len(own))]
        )

    def snapshots(self) -> SnapshotTier:
        """Return the tier if its states can be read beside training, or raise TypeError."""
        if not isinstance(self.tier, SnapshotTier):
            raise TypeError(
                f"{type(self.tier).__name__} has no watch_changes() and peek_state(), which a save "
                "beside training needs: save at once"
            )
        return self.tier


@dataclass(eq=False)
class HostPart(Part):
    """The host's part, which updates in the background."""

    is_host = True
    tier: HostTier

    def drain(self) -> float:
        """Wait for the host's steps and return the seconds of its updates so far."""
        return self.tier.drain()

    def add_grad(
        self, start: int, grad: Tensor, *, is_first: bool, is_last: bool
    ) -> Release | None:
        """Add a gradient to the tier's, of which it ``is_last``."""
        return self.tier.add_grad(start, grad, is_last=is_last)

    def offer_grad(self, start: int, grad: Tensor) -> Release | None:
        return self.tier.offer_grad(start, grad)

    def square_sum(self, start: int, stop: int) -> Callable[[], float]:
        """Start to compute a square sum, as `TwinTier.square_sum`. The call returned waits."""
        return self.tier.square_sum(start, stop).result

    def reserve(self, grads: Sequence[tuple[int, int, torch.dtype]], device: torch.device) -> None:
        """Allocate memory for ``(start, stop, dtype)`` of what is going to be offered."""
        self.tier.reserve({dtype for *_, dtype in grads})

    def report(self) -> PartReport:
        return PartReport(True, self.share.spans, self.tier.report())


@dataclass(eq=False)
class DevicePart(Part):
    """The device's part, with device memory for its gradients: the caller's may be reused.

    Copies, sums and the update are enqueued on the caller's stream, in order. ``has_sum``: copies
    are kept in the dtype of the master weights, in which micro-steps are added up.
    """

    is_host = False
    has_sum: bool = False
    _memory: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False)  # of gradients

    def drain(self) -> float:
        """Return the seconds of the host's updates: none."""
        return 0.0

    def add_grad(
        self, start: int, grad: Tensor, *, is_first: bool, is_last: bool
    ) -> Release | None:
        """Add a gradient to the tier's, of which it ``is_first``."""
        total = self._memory_of(start, grad)
        return self.tier.offer_grad(start, total.copy_(grad) if is_first else total.add_(grad))

    def offer_grad(self, start: int, grad: Tensor) -> Release | None:
        """Offer the tier a copy of a gradient that lasts."""
        return self.tier.offer_grad(start, self._memory_of(start, grad).copy_(grad))

    def _memory_of(self, start: int, grad: Tensor) -> Tensor:
        dtype = self._kept_dtype(grad.dtype)
        self._allocate(dtype, grad.device)
        return self._memory[dtype][start : start + grad.numel()]

    def _kept_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.geometry.master_dtype if self.has_sum else dtype

    def _allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        if dtype not in self._memory:
            self._memory[dtype] = torch.empty(self.geometry.numel, dtype=dtype, device=device)

    def square_sum(self, start: int, stop: int) -> Callable[[], Tensor]:
        """Compute a square sum, as `TwinTier.square_sum`: 0-dim, on the device."""
        (memory,) = self._memory.values()
        found = memory.new_zeros((), dtype=torch.float64)
        for part in torch.split(memory[start:stop], _SQUARED_NUMEL):
            found += torch.linalg.vector_norm(part, dtype=torch.float64).square()
        return lambda: found

    def reserve(self, grads: Sequence[tuple[int, int, torch.dtype]], device: torch.device) -> None:
        """Allocate memory for ``(start, stop, dtype)`` of what is going to be offered."""
        kept = [(start, stop, self._kept_dtype(dtype)) for start, stop, dtype in grads]
        for *_, dtype in kept:
            self._allocate(dtype, device)
        if isinstance(self.tier, ReservingTier):
            self.tier.reserve(kept)

    def device_tensors(self) -> dict[str, list[Tensor]]:
        """Return tensors of the tier, and the copies of gradients: "gradients"."""
        held = self.tier.device_tensors() if isinstance(self.tier, DeviceMemory) else {}
        found = {kind: list(tensors) for kind, tensors in held.items()}
        found["gradients"] = [*found.get("gradients", []), *self._memory.values()]
        return found

    def report(self) -> PartReport:
        if not isinstance(self.tier, FlatTier):
            return PartReport(False, self.share.spans, None)
        found = self.tier.report()
        copies = sum(memory.nbytes for memory in self._memory.values())
        found = replace(found, memory={**found.memory, "gradient copies": copies})
        return PartReport(False, self.share.spans, found)


AnyPart = HostPart | DevicePart


@dataclass(frozen=True, slots=True)
class PartWatcher:
    """`ChangeWatcher` of a part: ``watcher`` gets elements of the whole space."""

    watcher: ChangeWatcher
    share: Intervals

    def before_change(self, start: int, stop: int) -> None:
        if start < stop:
            first, last = self.share.element(start), self.share.element(stop - 1)
            for low, high in self.share.overlaps(first, last + 1):
                self.watcher.before_change(low, high)


BLOCK_NUMEL = 1 << 22
"""Elements of one state that are copied at once: 16 MiB of fp32."""


@dataclass(frozen=True, slots=True)
class HeldState:
    """State in plain host memory, between two tiers."""

    numel: int
    states: dict[str, Tensor] = field(default_factory=dict)

    def state_names(self) -> Sequence[str]:
        return tuple(self.states)

    def read_state(self, name: str, start: int, stop: int) -> Tensor:
        return self.states[name][start:stop]

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        """Copy one state's values. The dtype is that of the first."""
        if name not in self.states:
            self.states[name] = torch.zeros(self.numel, dtype=values.dtype, device="cpu")
        self.states[name][start : start + values.numel()].copy_(values)


def migrate(
    source: StateTier | HeldState,
    source_share: Intervals,
    write_state: Callable[[str, int, Tensor], None],
    share: Intervals,
) -> None:
    """Copy all states of the elements in both shares. ``write_state`` is that of ``share``."""
    common = source_share.intersection(share)
    for name in source.state_names():
        for low, high in common.spans:
            for start in range(low, high, BLOCK_NUMEL):
                at, to = source_share.local(start), share.local(start)
                numel = min(BLOCK_NUMEL, high - start)
                write_state(name, to, source.read_state(name, at, at + numel))
