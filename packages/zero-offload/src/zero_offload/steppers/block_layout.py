"""Division of a flat space into blocks, and the buffers of state that each block has.

[Note: blocks]
A block is a range of elements of one shard with a `Rule` and a set of buffers, the fp32 master
weights first unless they are split. Under a rule that updates any span, a block is a piece of a
shard, padding included. Under a rule that counts blocks of its own from a piece's start, it lies in
one piece and starts at a multiple of those, so that it is one span of that rule (see
`zero_offload.rules.rule`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_offload.flat.geometry import Geometry
from zero_offload.flat.span_map import SpanMap
from zero_offload.rules.rule import MASTER, PARAM, REMAINDER, Rule, Stored

_Kept = Mapping[str, tuple[torch.dtype, int]]


@dataclass(frozen=True, slots=True)
class Block:
    """Elements ``[start, stop)``, their rule, and dtype and length of each of their buffers."""

    start: int
    stop: int
    rule: Rule
    kept: _Kept

    def clip(self, stored: Stored, start: int, stop: int) -> dict[str, Tensor]:
        """Return the buffers of a range. Of the whole block, unless the rule takes any span."""
        if self.rule.block == 1:
            low, high = start - self.start, stop - self.start
            return {name: values[low:high] for name, values in stored.items()}
        assert (start, stop) == (self.start, self.stop), "a block is one span"
        return dict(stored)

    def decode(self, stored: Stored, name: str, start: int, stop: int) -> Tensor:
        return self.rule.decode(name, stored, start - self.start, stop - self.start)

    def encode(self, stored: Stored, name: str, start: int, values: Tensor) -> None:
        self.rule.encode(name, stored, start - self.start, values.to("cpu"))


class BlockLayout:
    """The blocks of a flat space, see [Note: blocks]. Pure arithmetic.

    Args:
        rules: the rule of each shard, after its ``for_params``; all count the same blocks.
        block_numel: most elements of a block, rounded up to the rule's own blocks; None for blocks
            of any length.

    Attributes:
        blocks: sorted and disjoint.
        names: of the buffers that some block has.
        record_bytes: bytes of each buffer of each block in turn, 0 for one that a block has not.
    """

    def __init__(
        self, geometry: Geometry, rules: Sequence[Rule], block_numel: int | None = None
    ) -> None:
        self.blocks: list[Block] = []
        for start, stop, rule in _spans(geometry, rules):
            own = rule.block
            most = stop - start if block_numel is None else -(-block_numel // own) * own
            for low in range(start, stop, max(most, 1)):
                high = min(low + most, stop)
                self.blocks.append(Block(low, high, rule, _kept(rule, high - low)))
        self._index = SpanMap((b.start, b.stop, i) for i, b in enumerate(self.blocks))
        everything = [*(_kept(rule, 0) for rule in rules), *(block.kept for block in self.blocks)]
        self.names = tuple(dict.fromkeys(name for kept in everything for name in kept))
        self.record_bytes = [_num_bytes(block.kept, n) for block in self.blocks for n in self.names]

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield ``(index, a, b)``: the parts of ``[start, stop)`` in blocks."""
        return ((index, a, b) for a, b, index in self._index.overlaps(start, stop))

    def parts_of(self, index: int, name: str) -> list[int]:
        """Return the indices of the buffers that a state of a block is read from and written to."""
        block = self.blocks[index]
        if name == MASTER and block.rule.is_master_split:
            return [self.names.index(PARAM), self.names.index(REMAINDER)]
        if name == MASTER or block.rule.block == 1:
            return [self.names.index(name)]
        return [part for part, n in enumerate(self.names) if n in block.kept and n != MASTER]


def _spans(geometry: Geometry, rules: Sequence[Rule]) -> Iterator[tuple[int, int, Rule]]:
    """The ranges that are divided into blocks, and the rule in each."""
    if all(rule.block == 1 for rule in rules):
        for (start, tensor), rule in zip(geometry.shards, rules, strict=True):
            yield start, start + tensor.numel(), rule
    else:
        for piece, shard in zip(geometry.pieces, geometry.piece_shards, strict=True):
            yield piece.start, piece.stop, rules[shard]


def _kept(rule: Rule, numel: int) -> _Kept:
    whole = {} if rule.is_master_split else {MASTER: (torch.float32, numel)}
    return {**whole, **rule.stored(numel)}


def _num_bytes(kept: _Kept, name: str) -> int:
    dtype, numel = kept.get(name, (torch.uint8, 0))
    return dtype.itemsize * numel
