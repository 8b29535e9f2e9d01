"""Changes that one rank makes to the gathered parameters, brought to all shards.

Only the elements that were changed are taken over: a master weight that was not touched keeps the
bits that its rounded copy lacks, and gathers that are not exact leave the rest as it was.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero_core.segment_values import SegmentValues
from zero_core.state import MASTER, ShardedState

__all__ = ["Edit"]


class Edit:
    """From when all values are gathered until `publish`, rank ``rank`` may change them."""

    def __init__(self, state: ShardedState, rank: int) -> None:
        """Remember the values on ``rank``; takes the memory of the whole model there.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < state.control.world_size:
            raise ValueError(
                f"modifier_rank = {rank}: expected a rank below {state.control.world_size}"
            )
        self._state = state
        self._rank = rank
        self._is_own = state.control.rank == rank
        self._before = [_full(v).clone() for v in state.values] if self._is_own else []

    @torch.no_grad()
    def publish(self) -> None:
        """Bring what changed to every rank; every rank must call it."""
        self._state.quiesce()  # others may still be gathering the old values
        masks = [
            _differs(_full(values), before)
            for values, before in zip(self._state.values, self._before, strict=False)
        ]
        has_changed = torch.zeros(len(self._state.values), device=self._state.device)
        if masks:
            has_changed.copy_(torch.stack([mask.any() for mask in masks]))
        self._state.control.broadcast(has_changed, source=self._rank)
        for index in torch.nonzero(has_changed).flatten().tolist():
            self._take_over(self._state.values[index], masks[index] if masks else None)

    def _take_over(self, values: SegmentValues, mask: Tensor | None) -> None:
        full = _full(values)
        is_changed = torch.empty_like(full, dtype=torch.uint8) if mask is None else mask.byte()
        changed = torch.empty_like(full) if mask is None else full
        self._state.control.broadcast(is_changed, source=self._rank)
        self._state.control.broadcast(changed, source=self._rank)
        mask = is_changed.bool()
        full.copy_(torch.where(mask, changed, full))
        low, high = values.segment.shard_range(self._state.control.rank)
        own = values.read_shard().to(full.device)
        values.overwrite(low, torch.where(mask[low:high], full[low:high], own))
        if values.local_span is not None:
            self._write_master(values, mask.cpu())

    def _write_master(self, values: SegmentValues, mask: Tensor) -> None:
        assert values.local_span is not None
        start, stop = values.local_span
        low, high = self._state.covered(values.segment.index)
        old = self._state.tier.read_state(MASTER, start, stop)
        new = _full(values)[low:high].cpu().to(old.dtype)
        self._state.tier.write_state(MASTER, start, torch.where(mask[low:high], new, old))


def _full(values: SegmentValues) -> Tensor:
    assert values.full is not None, "every unit is gathered"
    return values.full


def _differs(now: Tensor, before: Tensor) -> Tensor:
    return (now != before) & ~(now.isnan() & before.isnan())
