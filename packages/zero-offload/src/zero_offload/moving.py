"""Optimizer state on its way from one tier to another, a block at a time.

Only the StateTier's own calls are used, so that any tier can be moved out of and into.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Never, Protocol

import torch
from torch import Tensor

from zero_offload.geometry import Geometry
from zero_offload.intervals import Intervals
from zero_offload.progress import OffloadError
from zero_offload.protocols import StateTier
from zero_offload.stepper import MASTER

__all__ = ["HeldState", "Landing", "Part", "StateSource", "lost_part", "move_state"]

BLOCK_NUMEL = 1 << 22
"""Elements of one state that are under way at once: 16 MiB of fp32."""


class StateSource(Protocol):
    """What state is read from; every StateTier is one."""

    def state_names(self) -> Sequence[str]:
        """Names of the elementwise states."""
        ...

    def read_state(self, name: str, start: int, stop: int) -> Tensor:
        """A copy of one state over ``[start, stop)``: 1-D, on the CPU."""
        ...


class Landing:
    """Device memory for the gradients of the device's part: the caller's may be reused at once.

    Copies and the update are enqueued on the caller's stream, in order.
    """

    def __init__(self, numel: int) -> None:
        self._numel = numel
        self._memory: dict[torch.dtype, Tensor] = {}

    def copy(self, start: int, grad: Tensor) -> Tensor:
        """The gradient of ``[start, start + grad.numel())`` in memory that lasts."""
        if grad.dtype not in self._memory:
            self._memory[grad.dtype] = grad.new_empty(self._numel)
        return self._memory[grad.dtype][start : start + grad.numel()].copy_(grad)


@dataclass(frozen=True, slots=True)
class Part:
    """A tier over some elements of a flat space.

    Attributes:
        tier: works in coordinates of its own, `Intervals.local`.
        geometry: its flat space.
        share: the elements.
        local: the tier's piece indices by those of the whole space.
        is_host: whether the tier updates in host memory.
        landing: where gradients are kept for a tier that does not copy them itself.
    """

    tier: StateTier
    geometry: Geometry
    share: Intervals
    local: Mapping[int, tuple[int, ...]]
    is_host: bool
    landing: Landing | None

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        """As the tier's; padding by itself has no optimizer and no states but master weights."""
        if self.local or name == MASTER:
            self.tier.write_state(name, start, values)


@dataclass(frozen=True, slots=True)
class HeldState:
    """State kept in plain host memory, while the tier it came from makes room for the next."""

    numel: int
    states: dict[str, Tensor] = field(default_factory=dict)

    def state_names(self) -> Sequence[str]:
        """Names of what was written."""
        return tuple(self.states)

    def read_state(self, name: str, start: int, stop: int) -> Tensor:
        """A view of one state."""
        return self.states[name][start:stop]

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        """Keep one state's values; the dtype is that of the first."""
        if name not in self.states:
            self.states[name] = torch.zeros(self.numel, dtype=values.dtype, device="cpu")
        self.states[name][start : start + values.numel()].copy_(values)


def move_state(
    source: StateSource,
    source_share: Intervals,
    write_state: Callable[[str, int, Tensor], None],
    share: Intervals,
) -> None:
    """Copy every state of the elements that are in both shares.

    Args:
        source: holds the elements of ``source_share``.
        source_share: in the whole space's coordinates.
        write_state: takes a name, an offset in ``share``'s own space, and values.
        share: the target's elements.
    """
    common = source_share.intersection(share)
    for name in source.state_names():
        for low, high in common.spans:
            for start in range(low, high, BLOCK_NUMEL):
                at, to = source_share.local(start), share.local(start)
                numel = min(BLOCK_NUMEL, high - start)
                write_state(name, to, source.read_state(name, at, at + numel))


class _LostTier:
    """In the place of tiers whose state was lost on the way: every use says so."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Never:
        raise OffloadError(
            f"moving optimizer state between host and device failed ({self._error!r}), so a part "
            f"of it is lost; load a checkpoint into a new tier"
        ) from self._error


def lost_part(geometry: Geometry, error: BaseException) -> Part:
    """A part over the whole space that raises `OffloadError` whatever it is asked."""
    tier: Any = _LostTier(error)
    everything = {i: (i,) for i in range(len(geometry.pieces))}
    return Part(
        tier, geometry, Intervals([(0, geometry.numel)]), everything, is_host=True, landing=None
    )
