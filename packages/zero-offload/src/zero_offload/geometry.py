"""Where pieces and parameter shards lie in the local flat space. Pure arithmetic.

[Note: terms]
flat space   the elements ``[0, numel)`` whose optimizer state this process owns, padding included.
piece        the part of one parameter in the flat space; pieces are sorted and disjoint.
shard        a 1-D tensor of the compute dtype over ``[start, start + tensor.numel())``: where the
             new values of its pieces go. Every piece lies inside one shard.
run          a contiguous range of active pieces in one shard: what is updated and published at
             once. A unit of the model is one shard (per dtype), so that a run never makes the
             first unit wait for the second.
cut          the element ``k`` that parts the host's ``[0, k)`` from the device's ``[k, numel)``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["Geometry", "Piece", "Run", "check_active", "freeze_groups", "plan_runs"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``[start, stop)`` of one parameter, updated by ``param_groups[group]``."""

    start: int
    stop: int
    group: int


@dataclass(frozen=True, slots=True)
class Run:
    """Elements ``[start, stop)``: adjacent active pieces of one shard with an equal key."""

    start: int
    stop: int
    pieces: tuple[int, ...]
    key: Hashable = None


class Geometry:
    """The checked layout of one flat space: its pieces and its shards.

    Args:
        numel: length of the flat space in elements.
        pieces: ``(start, stop, group)``, sorted, disjoint, each inside one shard.
        params: ``(start, tensor)``, sorted, disjoint, 1-D and contiguous.
        num_groups: number of parameter groups.

    Raises:
        ValueError: when one of these does not hold, with the offending index.
    """

    def __init__(
        self,
        numel: int,
        pieces: Sequence[tuple[int, int, int]],
        params: Sequence[tuple[int, Tensor]],
        num_groups: int,
    ) -> None:
        self.numel = numel
        self.pieces = tuple(Piece(*piece) for piece in pieces)
        self.shards = tuple(params)
        self._starts = [start for start, _ in self.shards]
        self._piece_starts = [piece.start for piece in self.pieces]
        self._check_shards()
        self.piece_shards = tuple(self._check_piece(i, num_groups) for i in range(len(self.pieces)))

    def _check_shards(self) -> None:
        end = 0
        for i, (start, tensor) in enumerate(self.shards):
            if tensor.dim() != 1 or not tensor.is_contiguous():
                raise ValueError(f"params[{i}] must be 1-D and contiguous, is {tensor.shape}")
            if not tensor.is_floating_point():
                raise ValueError(f"params[{i}] must be floating point, is {tensor.dtype}")
            if start < end or start + tensor.numel() > self.numel:
                raise ValueError(
                    f"params[{i}] covers [{start}, {start + tensor.numel()}), which overlaps the "
                    f"one before or leaves the flat space [0, {self.numel})"
                )
            end = start + tensor.numel()

    def _check_piece(self, index: int, num_groups: int) -> int:
        piece = self.pieces[index]
        previous = self.pieces[index - 1].stop if index else 0
        where = f"pieces[{index}] = [{piece.start}, {piece.stop})"
        if not previous <= piece.start < piece.stop:
            raise ValueError(f"{where} is empty, unsorted or overlaps the one before")
        if not 0 <= piece.group < num_groups:
            raise ValueError(f"{where} names group {piece.group}; there are {num_groups}")
        shard = self.shard_at(piece.start)
        if shard < 0 or piece.stop > self._starts[shard] + self.shards[shard][1].numel():
            raise ValueError(f"{where} does not lie inside one tensor of params")
        return shard

    def check_range(self, start: int, stop: int) -> None:
        """Raise ValueError unless ``[start, stop)`` lies in the flat space."""
        if not 0 <= start <= stop <= self.numel:
            raise ValueError(f"[{start}, {stop}) is not within the flat space [0, {self.numel})")

    def master_dtype(self) -> torch.dtype:
        """Float64 when a shard is, so that nothing is lost; float32 otherwise."""
        wide = any(tensor.dtype == torch.float64 for _, tensor in self.shards)
        return torch.float64 if wide else torch.float32

    def clipped(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The pieces that overlap ``[start, stop)``: ``(a, b, piece)`` with the part in it."""
        first = bisect_right(self._piece_starts, start) - 1
        for index in range(max(first, 0), len(self.pieces)):
            piece = self.pieces[index]
            if piece.start >= stop:
                return
            a, b = max(start, piece.start), min(stop, piece.stop)
            if a < b:
                yield a, b, index

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
        """The parts ``(a, b, view of the shard)`` of ``[start, stop)`` that shards cover."""
        first = max(bisect_right(self._starts, start) - 1, 0)
        for index in range(first, len(self.shards)):
            base, tensor = self.shards[index]
            a, b = max(start, base), min(stop, base + tensor.numel())
            if base >= stop:
                return
            if a < b:
                yield a, b, tensor[a - base : b - base]

    def shard_at(self, start: int) -> int:
        """Index of the shard that covers element ``start``."""
        return bisect_right(self._starts, start) - 1

    def view(self, start: int, stop: int) -> Tensor:
        """The shard's memory behind ``[start, stop)``, which must lie inside one shard."""
        (_, _, view), *rest = self.overlaps(start, stop)
        assert not rest, "a run crosses shards"
        assert view.numel() == stop - start, "a run leaves its shard"
        return view

    def part(self, lo: int, hi: int, num_groups: int) -> tuple[Geometry, dict[int, int]]:
        """The flat space ``[lo, hi)`` by itself, and global -> local piece indices.

        Pieces and shards that straddle an end are clipped; offsets count from ``lo``.
        """
        pieces: list[tuple[int, int, int]] = []
        local: dict[int, int] = {}
        for i, piece in enumerate(self.pieces):
            a, b = max(piece.start, lo), min(piece.stop, hi)
            if a < b:
                local[i] = len(pieces)
                pieces.append((a - lo, b - lo, piece.group))
        shards = [(a - lo, view) for a, _, view in self.overlaps(lo, hi)]
        return Geometry(hi - lo, pieces, shards, num_groups), local


def plan_runs(
    geometry: Geometry, active: Sequence[int], keys: Mapping[int, Hashable] | None = None
) -> list[Run]:
    """Merge adjacent active pieces of one shard (and of one key) into runs, in order."""
    runs: list[Run] = []
    for i in active:
        piece, key = geometry.pieces[i], None if keys is None else keys[i]
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.stop == piece.start
            and last.key == key
            and geometry.piece_shards[last.pieces[-1]] == geometry.piece_shards[i]
        ):
            runs[-1] = Run(last.start, piece.stop, (*last.pieces, i), key)
        else:
            runs.append(Run(piece.start, piece.stop, (i,), key))
    return runs


def check_active(geometry: Geometry, active: Sequence[int]) -> tuple[int, ...]:
    """``active`` as a tuple; ValueError unless it is sorted, unique and in range."""
    indices = tuple(active)
    bounds = (-1, *indices, len(geometry.pieces))
    if any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(
            f"active must be sorted, unique piece indices below {len(geometry.pieces)}: {active}"
        )
    return indices


def _plain(value: Any) -> Any:
    """A one-element tensor as the number it holds; tuples and lists by element."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return type(value)(_plain(item) for item in value)
    return value


def freeze_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the groups as they are now, without ``params``, tensors turned into numbers.

    The worker reads them while a scheduler may already change the originals.
    """
    return [{k: _plain(v) for k, v in group.items() if k != "params"} for group in groups]
