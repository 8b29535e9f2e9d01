"""Part of a flat space that one tier holds, and migration of its state to another tier.

State migrates a block at a time. Only the StateTier's own calls are used, so that it can migrate
between any two tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from zero_offload.flat.geometry import Geometry
from zero_offload.flat.intervals import Intervals
from zero_offload.protocols import (
    ChangeWatcher,
    DeviceMemory,
    Groups,
    ReservingTier,
    SnapshotTier,
    StateTier,
)
from zero_offload.rules.rule import MASTER
from zero_offload.tiers.flat_tier import FlatTier, HostTier, TierReport
from zero_offload.transfers.mover import Release

_SQUARED_NUMEL = 1 << 24
"""Elements whose squares are summed at once: torch may convert so many to float64."""


class GradStaging:
    """Device memory for the gradients of the device's part, so that the caller's may be reused.

    Copies, sums and the update are enqueued on the caller's stream, in order. With ``has_sum``
    copies are kept in ``sum_dtype``, in which micro-steps are added up.
    """

    def __init__(self, numel: int, sum_dtype: torch.dtype) -> None:
        self.num_bytes = 0
        self._numel = numel
        self._sum_dtype = sum_dtype
        self.has_sum = False
        self._memory: dict[torch.dtype, Tensor] = {}

    def copy(self, start: int, grad: Tensor) -> Tensor:
        """Return a lasting copy of the gradient of ``[start, start + grad.numel())``."""
        return self._of(start, grad).copy_(grad)

    def add(self, start: int, grad: Tensor) -> Tensor:
        """Add to the lasting copy of an earlier gradient of the range, and return it."""
        return self._of(start, grad).add_(grad)

    def kept_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of ``dtype`` are kept."""
        return self._sum_dtype if self.has_sum else dtype

    def reserve(self, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate memory for gradients that are kept in ``dtype``, if there is none yet."""
        if dtype not in self._memory:
            self._memory[dtype] = torch.empty(self._numel, dtype=dtype, device=device)
            self.num_bytes += self._memory[dtype].nbytes

    def _of(self, start: int, grad: Tensor) -> Tensor:
        dtype = self.kept_dtype(grad.dtype)
        self.reserve(dtype, grad.device)
        return self._memory[dtype][start : start + grad.numel()]

    @property
    def tensors(self) -> list[Tensor]:
        """All memory of the copies."""
        return list(self._memory.values())

    def square_sum(self, start: int, stop: int) -> Tensor:
        """Return the sum of the squares of a range's copy: 0-dim, float64, on its device."""
        (memory,) = self._memory.values()
        found = memory.new_zeros((), dtype=torch.float64)
        for part in torch.split(memory[start:stop], _SQUARED_NUMEL):
            found += torch.linalg.vector_norm(part, dtype=torch.float64).square()
        return found


@dataclass(frozen=True, slots=True)
class PartReport:
    """Elements of one part and what its tier reports.

    Attributes:
        is_host: whether the host updates it.
        spans: its elements, as sorted ``(start, stop)`` pairs.
        tier: None for a tier of another package.
    """

    is_host: bool
    spans: tuple[tuple[int, int], ...]
    tier: TierReport | None


@dataclass(frozen=True, slots=True)
class Part:
    """A tier over some elements of a flat space.

    Attributes:
        tier: has coordinates of its own, `Intervals.local`.
        geometry: its flat space.
        share: the elements.
        local: the tier's piece indices by those of the whole space.
        is_host: whether the tier is the host's, which updates in the background.
        staging: copies of gradients, for a tier that does not copy them itself.
    """

    tier: StateTier
    geometry: Geometry
    share: Intervals
    local: Mapping[int, tuple[int, ...]]
    is_host: bool
    staging: GradStaging | None

    def expect_micro_steps(self, count: int) -> None:
        """Expect ``count`` calls of `add_grad` per range and step."""
        if isinstance(self.tier, HostTier):
            self.tier.expect_micro_steps(count)
        if self.staging is not None:
            self.staging.has_sum = True

    def enable_undo(self, most_bytes: int | None) -> bool:
        """Have an undo log, on the host. Return whether the host's updates can be undone."""
        return not isinstance(self.tier, HostTier) or self.tier.enable_undo(most_bytes)

    def speculate(self, groups: Groups, active: Sequence[int], *, grad_scale: float) -> None:
        """Have the host begin a step over the part's own pieces, before its decision."""
        if isinstance(self.tier, HostTier):
            self.tier.speculate(groups, active, grad_scale=grad_scale)

    def reserve(self, grads: Sequence[tuple[int, int, torch.dtype]], device: torch.device) -> None:
        """Allocate memory for ``(start, stop, dtype)`` of what is going to be offered."""
        if self.staging is not None:
            kept = self.staging.kept_dtype
            grads = [(start, stop, kept(dtype)) for start, stop, dtype in grads]
            for *_, dtype in grads:
                self.staging.reserve(dtype, device)
        if isinstance(self.tier, ReservingTier):
            self.tier.reserve(grads)

    def device_tensors(self) -> dict[str, list[Tensor]]:
        """Return tensors of the tier, and the copies of gradients: "gradients"."""
        held = self.tier.device_tensors() if isinstance(self.tier, DeviceMemory) else {}
        found = {kind: list(tensors) for kind, tensors in held.items()}
        if self.staging is not None:
            found["gradients"] = [*found.get("gradients", []), *self.staging.tensors]
        return found

    def offer_grad(self, start: int, grad: Tensor) -> Release | None:
        """Offer the tier a gradient, or a copy of it that lasts."""
        return self.tier.offer_grad(
            start, grad if self.staging is None else self.staging.copy(start, grad)
        )

    def add_grad(
        self, start: int, grad: Tensor, *, is_first: bool, is_last: bool
    ) -> Release | None:
        """Add a gradient to the tier's, of which it ``is_first``, or ``is_last``."""
        if isinstance(self.tier, HostTier):
            return self.tier.add_grad(start, grad, is_last=is_last)
        assert self.staging is not None, "a tier of the device has it"
        total = self.staging.copy(start, grad) if is_first else self.staging.add(start, grad)
        return self.tier.offer_grad(start, total)

    def drop_grads(self, start: int, stop: int) -> None:
        """Forget a range's gradient. The device's next one replaces it in any case."""
        if isinstance(self.tier, HostTier):
            self.tier.drop_grads(start, stop)

    def square_sum(self, start: int, stop: int) -> Callable[[], Tensor | float]:
        """Start to compute a square sum, as `TwinTier.square_sum`. The call returned waits."""
        if isinstance(self.tier, HostTier):
            return self.tier.square_sum(start, stop).result
        assert self.staging is not None, "a tier of the device has it"
        total = self.staging.square_sum(start, stop)
        return lambda: total

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

    def watch_changes(self, watcher: ChangeWatcher) -> None:
        """Call ``watcher`` before states change, with elements of the whole space."""
        self._snapshot_tier().watch_changes(_PartWatcher(watcher, self.share))

    def peek_state(self, name: str, start: int, stop: int) -> Tensor:
        """Return what ``read_state`` of the tier does, in any thread."""
        return self._snapshot_tier().peek_state(name, start, stop)

    def _snapshot_tier(self) -> SnapshotTier:
        if not isinstance(self.tier, SnapshotTier):
            raise TypeError(
                f"{type(self.tier).__name__} has no watch_changes() and peek_state(), which a save "
                "beside training needs: save at once"
            )
        return self.tier

    def drain(self) -> float:
        """Wait for the host's steps and return the seconds of its updates so far, or 0."""
        return self.tier.drain() if isinstance(self.tier, HostTier) else 0.0

    def report(self) -> PartReport:
        if not isinstance(self.tier, FlatTier):
            return PartReport(self.is_host, self.share.spans, None)
        found = self.tier.report()
        if self.staging is not None:
            copies = found.memory["gradient copies"] + self.staging.num_bytes
            found = replace(found, memory={**found.memory, "gradient copies": copies})
        return PartReport(self.is_host, self.share.spans, found)


class _PartWatcher:
    """`ChangeWatcher` of a part."""

    def __init__(self, watcher: ChangeWatcher, share: Intervals) -> None:
        self._watcher = watcher
        self._share = share

    def before_change(self, start: int, stop: int) -> None:
        if start < stop:
            first, last = self._share.element(start), self._share.element(stop - 1)
            for low, high in self._share.overlaps(first, last + 1):
                self._watcher.before_change(low, high)


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
    """Copy every state of the elements that are in both shares.

    ``write_state`` takes a name, an offset in ``share``'s own space, and values.
    """
    common = source_share.intersection(share)
    for name in source.state_names():
        for low, high in common.spans:
            for start in range(low, high, BLOCK_NUMEL):
                at, to = source_share.local(start), share.local(start)
                numel = min(BLOCK_NUMEL, high - start)
                write_state(name, to, source.read_state(name, at, at + numel))
