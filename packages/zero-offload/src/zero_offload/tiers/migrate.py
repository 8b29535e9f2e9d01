"""Migration of optimizer state from one tier to another, a block at a time.

Only the StateTier's own calls are used, so that state can migrate between any two tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero_offload.flat.intervals import Intervals
from zero_offload.protocols import StateTier

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

    Args:
        source_share: in the whole space's coordinates.
        write_state: takes a name, an offset in ``share``'s own space, and values.
    """
    common = source_share.intersection(share)
    for name in source.state_names():
        for low, high in common.spans:
            for start in range(low, high, BLOCK_NUMEL):
                at, to = source_share.local(start), share.local(start)
                numel = min(BLOCK_NUMEL, high - start)
                write_state(name, to, source.read_state(name, at, at + numel))
