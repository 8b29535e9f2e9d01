"""Small parameters that stay whole at stage 3, as copies between the uses of their units.

A forward and a backward use the gathered unit, as without copies: training has the same bits. The
copies are for whoever reads a parameter elsewhere. `SmallParams.refresh` fills them from the shards
in one exchange of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zero_core.core.params import FlatParams
from zero_core.sharded.sharded_state import ShardedState


class SmallParams:
    """Copies of parameters of at most so many elements, until `remove`."""

    def __init__(self, state: ShardedState, max_numel: int, max_total: int) -> None:
        """Prepare for parameters of up to ``max_numel`` elements, ``max_total`` in all."""
        self._state = state
        self._limits = max_numel, max_total
        self._held: list[tuple[FlatParams, int]] | None = None
        self._bytes: list[Tensor] = []
        self._nbytes = 0

    def _hold(self) -> list[tuple[FlatParams, int]]:
        """Make the copies, without values, and return their places."""
        max_numel, max_total = self._limits
        held = self._held = []
        for flat, position in self._state.places.values():
            like = flat.params[position]
            numel = like.numel()
            if flat.is_kept or flat.segment.is_opaque or numel > min(max_numel, max_total):
                continue
            max_total -= numel
            spec = self._state.layout.params[flat.segment.slots[position].param]
            elements = torch.empty(numel, dtype=like.dtype, device=like.device)
            copy = flat.shown.hold(position, spec.to_values(elements))
            held.append((flat, position))
            self._bytes.append(spec.to_elements(copy).view(torch.uint8))
        ranks = range(self._state.control.world_size)
        self._nbytes = max(sum(p.numel() for p in self._parts(held, r)) for r in ranks)
        return held

    def _parts(self, held: list[tuple[FlatParams, int]], rank: int) -> Iterator[Tensor]:
        """Yield the bytes of the copies that are in the shards of ``rank``."""
        for (flat, position), content in zip(held, self._bytes, strict=True):
            segment = flat.segment
            found = segment.slots[position].common(*segment.shard_range(rank))
            yield content[slice(*(segment.dtype.itemsize * n for n in found))]

    @torch.no_grad()
    def refresh(self) -> None:
        """Fill the copies with the current values. Every rank must call it, outside a forward."""
        held = self._hold() if self._held is None else self._held
        if not held:
            return
        own = torch.zeros(self._nbytes, dtype=torch.uint8, device=self._state.device)
        start = 0
        for flat, position in held:
            flat.source.wait_update()
            part = flat.part_of(position, flat.source.read()).view(torch.uint8)
            own[start : start + part.numel()].copy_(part)
            start += part.numel()
        rows = self._state.control.gather_on_device(own).view(-1, self._nbytes)
        for rank, row in enumerate(rows):
            parts = [part for part in self._parts(held, rank) if part.numel()]
            if parts:
                sizes = [part.numel() for part in parts]
                torch._foreach_copy_(parts, row[: sum(sizes)].split(sizes))

    def remove(self) -> None:
        """Leave the parameters to their shards alone."""
        for flat, position in self._held or ():
            flat.shown.drop(position)
        self._held, self._bytes = [], []
