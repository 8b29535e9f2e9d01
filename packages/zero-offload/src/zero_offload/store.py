"""The memory of one shard's state, in the form that a rule keeps it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from zero_offload.update_rule import PARAM, REMAINDER, Rule, Stored

__all__ = ["ShardStore"]


class ShardStore:
    """The buffers that a rule keeps for the pieces of one shard, in host memory.

    Args:
        rule: how they are kept; its ``for_params`` has been called.
        spans: ``(start, stop)`` of each stretch in the flat space, sorted: the whole shard, or
            each piece if the rule counts blocks from a piece's start.
        upper: memory of the parameters over a range inside the shard, where a split master weight
            has its upper half.
    """

    def __init__(
        self,
        rule: Rule,
        spans: Sequence[tuple[int, int]],
        upper: Callable[[int, int], Tensor],
    ) -> None:
        self.rule = rule
        self.spans = tuple(spans)
        self._upper = upper
        self._starts = [start for start, _ in spans]
        sizes = [rule.stored(stop - start) for start, stop in spans]
        self._buffers: dict[str, Tensor] = {}
        self._offsets: dict[str, list[int]] = {}
        for name, (dtype, _) in rule.stored(0).items():
            if name != PARAM:
                *offsets, total = accumulate((size[name][1] for size in sizes), initial=0)
                self._offsets[name] = offsets
                self._buffers[name] = torch.zeros(total, dtype=dtype, device="cpu")

    def num_bytes(self, *, is_master: bool) -> int:
        """Bytes of the buffers: of the remainders of master weights, or of the state."""
        found = self._buffers.items()
        return sum(buffer.nbytes for name, buffer in found if (name == REMAINDER) == is_master)

    def views(self, start: int, stop: int) -> Stored:
        """The buffers of ``[start, stop)``, which lies in one stretch and starts with a block."""
        index = bisect_right(self._starts, start) - 1
        first = self._starts[index]
        low, high = self.rule.stored(start - first), self.rule.stored(stop - first)
        found: dict[str, Tensor] = {}
        for name, buffer in self._buffers.items():
            base = self._offsets[name][index]
            found[name] = buffer[base + low[name][1] : base + high[name][1]]
        if self.rule.is_master_split:
            found[PARAM] = self._upper(start, stop)
        return found

    def read(self, name: str, out: Tensor, start: int) -> None:
        """Copy a state into ``out``, which stands for ``[start, start + out.numel())``."""
        for first, last, a, b in self._overlaps(start, start + out.numel()):
            values = self.rule.decode(name, self.views(first, last), a - first, b - first)
            out[a - start : b - start].copy_(values)

    def write(self, name: str, values: Tensor, start: int) -> None:
        """Overwrite the part of a state that ``values`` covers, from ``start`` on."""
        for first, last, a, b in self._overlaps(start, start + values.numel()):
            part = values[a - start : b - start].to("cpu")
            self.rule.encode(name, self.views(first, last), a - first, part)

    def _overlaps(self, start: int, stop: int) -> list[tuple[int, int, int, int]]:
        """Each stretch ``[first, last)`` that overlaps a range, and the part in it."""
        low = max(bisect_right(self._starts, start) - 1, 0)
        parts: list[tuple[int, int, int, int]] = []
        for first, last in self.spans[low:]:
            if first >= stop:
                break
            if max(first, start) < min(last, stop):
                parts.append((first, last, max(first, start), min(last, stop)))
        return parts
