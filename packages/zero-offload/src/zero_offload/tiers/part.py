"""Part of a flat space that one tier holds, and migration of state between tiers.

Migration uses StateTier methods only, so it works between any two tiers.
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
    """Sorted ``(start, stop)`` spans of a part, and its tier's report: None for an engine's."""

    is_host: bool
    spans: tuple[tuple[int, int], ...]
    tier: TierReport | None


@dataclass(eq=False)
class Part:
    """A tier over some elements of a flat space.

    Attributes:
        tier: the tier, whose offsets are `Intervals.local`.
        geometry: the tier's flat space.
        share: the elements.
        local: the tier's piece indices, by piece index of the whole space.
        is_host: whether the tier is on the host and updates in the background.
    """

    is_host: ClassVar[bool]
    tier: StateTier
    geometry: Geometry
    share: Intervals
    local: Mapping[int, tuple[int, ...]]

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        """Overwrite a state. A part with padding only has no states but master weights."""
        if self.local or name == MASTER:
            self.tier.write_state(name, start, values)

    def check_states(self, names: Collection[str], scalars: Sequence[Mapping[str, float]]) -> None:
        """Raise unless the states and scalars of the part's pieces could be written."""
        own = {index: piece for piece, indices in self.local.items() for index in indices}
        self.tier.check_states(
            names if own else (), [scalars[own[index]] for index in range(len(own))]
        )

    def snapshots(self) -> SnapshotTier:
        """Return the tier if its states can be read during training, else raise TypeError."""
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
        return self.tier.drain()

    def add_grad(
        self, start: int, grad: Tensor, *, is_first: bool, is_last: bool
    ) -> Release | None:
        return self.tier.add_grad(start, grad, is_last=is_last)

    def offer_grad(self, start: int, grad: Tensor) -> Release | None:
        return self.tier.offer_grad(start, grad)

    def square_sum(self, start: int, stop: int) -> Callable[[], float]:
        """Start to compute a sum of squares, see `TwinTier.square_sum`. The result waits for it."""
        return self.tier.square_sum(start, stop).result

    def reserve(self, grads: Sequence[tuple[int, int, torch.dtype]], device: torch.device) -> None:
        self.tier.reserve({dtype for *_, dtype in grads})

    def report(self) -> PartReport:
        return PartReport(True, self.share.spans, self.tier.report())


@dataclass(eq=False)
class DevicePart(Part):
    """The device's part, with device memory for copies of gradients.

    Copies, sums and updates are enqueued on the caller's stream, in order. With ``has_sum``
    micro-steps are added in the master weights' dtype.
    """

    is_host = False
    has_sum: bool = False
    # gradients by dtype
    _memory: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False)

    def drain(self) -> float:
        return 0.0

    def add_grad(
        self, start: int, grad: Tensor, *, is_first: bool, is_last: bool
    ) -> Release | None:
        """Add a gradient to the tier's gradient, or replace it if ``is_first``."""
        total = self._memory_of(start, grad)
        return self.tier.offer_grad(start, total.copy_(grad) if is_first else total.add_(grad))

    def offer_grad(self, start: int, grad: Tensor) -> Release | None:
        """Offer the tier a copy of the gradient, because the caller may reuse its memory."""
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
        """Compute a sum of squares, see `TwinTier.square_sum`, as a scalar tensor on the device."""
        (memory,) = self._memory.values()
        found = memory.new_zeros((), dtype=torch.float64)
        for part in torch.split(memory[start:stop], _SQUARED_NUMEL):
            found += torch.linalg.vector_norm(part, dtype=torch.float64).square()
        return lambda: found

    def reserve(self, grads: Sequence[tuple[int, int, torch.dtype]], device: torch.device) -> None:
        kept = [(start, stop, self._kept_dtype(dtype)) for start, stop, dtype in grads]
        for *_, dtype in kept:
            self._allocate(dtype, device)
        if isinstance(self.tier, ReservingTier):
            self.tier.reserve(kept)

    def device_tensors(self) -> dict[str, list[Tensor]]:
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
    """`ChangeWatcher` of a part, which passes offsets of the whole space to ``watcher``."""

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
        """Copy one state's values. Its first values determine the dtype."""
        if name not in self.states:
            self.states[name] = torch.zeros(self.numel, dtype=values.dtype, device="cpu")
        self.states[name][start : start + values.numel()].copy_(values)


def migrate(
    source: StateTier | HeldState,
    source_share: Intervals,
    write_state: Callable[[str, int, Tensor], None],
    share: Intervals,
) -> None:
    """Copy all states of the elements in both shares. ``write_state`` has offsets in ``share``."""
    common = source_share.intersection(share)
    for name in source.state_names():
        for low, high in common.spans:
            for start in range(low, high, BLOCK_NUMEL):
                at, to = source_share.local(start), share.local(start)
                numel = min(BLOCK_NUMEL, high - start)
                write_state(name, to, source.read_state(name, at, at + numel))
