"""Which elements, and which buffers of their state, lie in which block of a file.

[Note: blocks]
The file holds the flat space in blocks of at most a given number of elements. A block's **parts**
are the buffers that its `Rule` keeps for it, fp32 master weights first unless they are split.
Under a rule that updates any stretch, a block is a piece of a shard, padding included. Under a rule
that counts blocks of its own from a piece's start, it lies in one piece and starts at a multiple of
those, so that it is one stretch of that rule (see `update_rule`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_offload.geometry import Geometry
from zero_offload.update_rule import MASTER, PARAM, REMAINDER, Rule

__all__ = ["Block", "BlockLayout"]

_Kept = Mapping[str, tuple[torch.dtype, int]]


@dataclass(frozen=True, slots=True)
class Block:
    """Elements ``[start, stop)``, their rule, and dtype and length of each buffer kept for them."""

    start: int
    stop: int
    rule: Rule
    kept: _Kept


class BlockLayout:
    """The blocks of a flat space, see [Note: blocks]. Pure arithmetic.

    Args:
        geometry: the flat space.
        rule: how state is kept, before its ``for_params``.
        block_numel: most elements of a block; rounded up to the rule's own blocks.

    Attributes:
        blocks: sorted and disjoint.
        names: of the parts that some block has.
        record_bytes: of each part of each block in turn; 0 for a part that the block has not.
    """

    def __init__(self, geometry: Geometry, rule: Rule, block_numel: int) -> None:
        most = -(-block_numel // rule.block) * rule.block
        self.blocks = [
            Block(low, min(low + most, stop), own, _kept(own, min(low + most, stop) - low))
            for start, stop, own in _spans(geometry, rule)
            for low in range(start, stop, most)
        ]
        self._starts = [block.start for block in self.blocks]
        everything = [_kept(rule, 0), *(block.kept for block in self.blocks)]
        self.names = tuple(dict.fromkeys(name for kept in everything for name in kept))
        self.record_bytes = [_num_bytes(block.kept, n) for block in self.blocks for n in self.names]

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """``(index, a, b)``: the parts of ``[start, stop)`` that lie in blocks."""
        for index in range(max(bisect_right(self._starts, start) - 1, 0), len(self.blocks)):
            block = self.blocks[index]
            if block.start >= stop:
                return
            a, b = max(start, block.start), min(stop, block.stop)
            if a < b:
                yield index, a, b

    def views(self, index: int, memory: Sequence[Tensor]) -> dict[str, Tensor]:
        """The buffers of a block, by name, in the bytes of its parts."""
        kept = self.blocks[index].kept
        named = zip(self.names, memory, strict=True)
        return {name: part.view(kept[name][0]) for name, part in named if name in kept}

    def parts_of(self, index: int, name: str) -> list[int]:
        """The parts that a state of a block is read from and written to."""
        block = self.blocks[index]
        if name == MASTER and block.rule.is_master_split:
            return [self.names.index(PARAM), self.names.index(REMAINDER)]
        if name == MASTER or block.rule.block == 1:
            return [self.names.index(name)]
        return [part for part, n in enumerate(self.names) if n in block.kept and n != MASTER]


def _spans(geometry: Geometry, rule: Rule) -> Iterator[tuple[int, int, Rule]]:
    """The ranges that are cut into blocks, and the rule in each."""
    rules = [rule.for_params(tensor.dtype) for _, tensor in geometry.shards]
    if rule.block == 1:
        for (start, tensor), own in zip(geometry.shards, rules, strict=True):
            yield start, start + tensor.numel(), own
    else:
        for piece, shard in zip(geometry.pieces, geometry.piece_shards, strict=True):
            yield piece.start, piece.stop, rules[shard]


def _kept(rule: Rule, numel: int) -> _Kept:
    whole = {} if rule.is_master_split else {MASTER: (torch.float32, numel)}
    return {**whole, **rule.stored(numel)}


def _num_bytes(kept: _Kept, name: str) -> int:
    dtype, numel = kept.get(name, (torch.uint8, 0))
    return dtype.itemsize * numel
