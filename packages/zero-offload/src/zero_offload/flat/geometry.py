"""Layout of pieces and parameter shards in the local flat space. Pure arithmetic.

[Note: terms]
flat space   the elements ``[0, numel)`` whose optimizer state this process owns, padding included.
piece        the part of one parameter in the flat space; pieces are sorted and disjoint.
shard        a 1-D tensor of the compute dtype over ``[start, start + tensor.numel())``, which the
             new values of its pieces are written to. Every piece lies inside one shard.
run          a contiguous range of active pieces in one shard, updated and published at once. A
             unit of the model is one shard (per dtype), so that a run never makes the first unit
             wait for the second.
part         a set of elements (`Intervals`) that one tier holds. Compacted, it is a flat space of
             its own. Pieces and shards that the set splits become several there.
split point  the element at which the host's share begins (or ends, where it is the first part).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from zero_offload.flat.intervals import Intervals, SpanMap
from zero_offload.protocols import Groups

PUBLISHED_NUMEL = 1 << 24
"""Default of the most elements that are published at once. Large enough to cost nothing, small
enough that the update, the copy to the device and the wait for it overlap."""


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
        pieces: ``(start, stop, group)``, sorted, disjoint, each inside one shard.
        params: ``(start, tensor)``, sorted, disjoint, 1-D and contiguous.
        master_dtype: of the master weights. By default float64 when a shard is, so that nothing is
            lost, and float32 otherwise. A part has the dtype of the whole, because the split must
            not change a bit.
        published_numel: most elements of a run that are published at once; `PUBLISHED_NUMEL` by
            default.

    Raises:
        ValueError: when one of these does not hold, with the offending index.
    """

    def __init__(
        self,
        numel: int,
        pieces: Sequence[tuple[int, int, int]],
        params: Sequence[tuple[int, Tensor]],
        num_groups: int,
        *,
        master_dtype: torch.dtype | None = None,
        published_numel: int | None = None,
    ) -> None:
        self.numel = numel
        self.published_numel = published_numel or PUBLISHED_NUMEL
        self.pieces = tuple(Piece(*piece) for piece in pieces)
        self.shards = tuple(params)
        self._num_groups = num_groups
        is_wide = any(tensor.dtype == torch.float64 for _, tensor in self.shards)
        self.master_dtype = master_dtype or (torch.float64 if is_wide else torch.float32)
        self._check_shards()
        self._shards = SpanMap((a, a + t.numel(), i) for i, (a, t) in enumerate(self.shards))
        self._pieces = SpanMap((p.start, p.stop, i) for i, p in enumerate(self.pieces))
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
        if shard < 0 or piece.stop > self.shards[shard][0] + self.shards[shard][1].numel():
            raise ValueError(f"{where} does not lie inside one tensor of params")
        return shard

    def check_range(self, start: int, stop: int) -> None:
        """Raise ValueError unless ``[start, stop)`` is within the flat space."""
        if not 0 <= start <= stop <= self.numel:
            raise ValueError(f"[{start}, {stop}) is not within the flat space [0, {self.numel})")

    def align(self, share: Intervals, alignment: int) -> Intervals:
        """Move split points within a piece down to a multiple of ``alignment`` from its start."""
        return Intervals(
            (self._align_down(start, alignment), self._align_down(stop, alignment))
            for start, stop in share.spans
        )

    def _align_down(self, split: int, alignment: int) -> int:
        found = self._pieces.last_from(split)
        if found is None or split >= found[1]:
            return split
        start = found[0]
        return start + (split - start) // alignment * alignment

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the parts ``(a, b, view of the shard)`` of ``[start, stop)`` that shards cover."""
        for a, b, index in self._shards.overlaps(start, stop):
            base, tensor = self.shards[index]
            yield a, b, tensor[a - base : b - base]

    def shard_at(self, start: int) -> int:
        """Return the index of the shard that covers element ``start``, or -1."""
        found = self._shards.last_from(start)
        return -1 if found is None else found[2]

    def view(self, start: int, stop: int) -> Tensor:
        """Return the memory of ``[start, stop)``, a range inside one shard."""
        (_, _, view), *rest = self.overlaps(start, stop)
        assert not rest, "a run crosses shards"
        assert view.numel() == stop - start, "a run leaves its shard"
        return view

    def padded_spans(self, indices: Sequence[int]) -> Intervals:
        """Return the elements of some pieces, each with the padding up to the next piece."""
        ends = [*(piece.start for piece in self.pieces[1:]), self.numel]
        return Intervals((self.pieces[i].start, ends[i]) for i in indices)

    def part(self, share: Intervals) -> tuple[Geometry, dict[int, tuple[int, ...]]]:
        """Return a part as a flat space of its own, and its piece indices by those of this one.

        Offsets there are `Intervals.local`; its shards are views of these.
        """
        pieces: list[tuple[int, int, int]] = []
        local: dict[int, tuple[int, ...]] = {}
        for i, piece in enumerate(self.pieces):
            found = [
                (share.local(a), share.local(a) + b - a, piece.group)
                for a, b in share.overlaps(piece.start, piece.stop)
            ]
            if found:
                local[i] = tuple(range(len(pieces), len(pieces) + len(found)))
                pieces.extend(found)
        shards = [
            (share.local(a), view) for span in share.spans for a, _, view in self.overlaps(*span)
        ]
        part = Geometry(
            share.numel,
            pieces,
            shards,
            self._num_groups,
            master_dtype=self.master_dtype,
            published_numel=self.published_numel,
        )
        return part, local


def split_runs(runs: Sequence[Run], numel: int) -> list[Run]:
    """Split runs into runs of at most ``numel`` elements, each with the pieces of its whole."""
    return [
        Run(low, min(low + numel, run.stop), run.pieces, run.key)
        for run in runs
        for low in range(run.start, run.stop, numel)
    ]


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
    indices = tuple(active)
    bounds = (-1, *indices, len(geometry.pieces))
    if any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(
            f"active must be sorted, unique piece indices below {len(geometry.pieces)}: {active}"
        )
    return indices


def _plain(value: Any) -> Any:
    """Return the number in a one-element tensor. Tuples and lists by element."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return type(value)(_plain(item) for item in value)
    return value


def freeze_groups(groups: Groups) -> list[dict[str, Any]]:
    """Return copies that a scheduler cannot change: no parameters, and numbers for tensors."""
    left_out = ("params", "param_names")
    return [{k: _plain(v) for k, v in group.items() if k not in left_out} for group in groups]
