"""Log of the published values that changed, for patches of the weights.

[Note: versions]
A *version* is the state of the compute weights when a patch was written: version 0 is that of the
engine's start. What changes between two of them belongs to the later one. The log keeps the
positions, not the values: a patch has the newest values at all positions that changed since the
receiver's version. A position that is logged late, or twice, only makes a patch longer.

For a few updates it is known how far values have moved: where none was by more than `NEAR`, a patch
has low bits alone ([Note: low bits] in `positions`).

While a version is open a compared shard has two bits per element: a weight that changed, and one
that moved far. Afterwards it has about a byte per changed weight, and a bit and a quarter at most.

[Note: how changes are found]
A *compared* shard is 16-bit, and is not its own master weight. The state tier does not write it: it
sees a shard on the meta device, and hands new values to this log as to any
`zero_core.protocols.ParamStore`. The old ones are in the shard until they are overwritten here, and
both are compared in the cache. Every other trained shard counts as changed whenever it was updated:
in fp32 nearly all values do change in a step. Values written from outside of a step (checkpoints of
frozen parameters, ``gathered``) are noted by parameter: `FlatParams.edit`.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import itemgetter

import torch
from torch import Tensor

from zero_core.core.params import FlatParams
from zero_core.protocols import ParamStore
from zero_core.sharded.changes.positions import (
    Kind,
    compare,
    decode_gaps,
    encode,
    num_bits_bytes,
    pack_bits,
    unpack_bits,
)

_CPU_NUMEL = 1 << 18  # old and new values of so many elements fit a core's cache
_DEVICE_NUMEL = 1 << 25


class ShardChanges:
    """Positions in a shard of ``numel`` elements that changed in one version.

    They are two sets: all of them, and those moved by more than `NEAR` at once.
    """

    def __init__(self, numel: int) -> None:
        self.num_updates = 0  # how often a value may have changed
        self._numel = numel
        self._ranges: list[tuple[int, int]] = []  # in both sets
        self._sets: list[tuple[Kind, Tensor]] = []  # the rest of each. One set: all moved far
        self._written: list[tuple[int, int]] = []  # by the last update: starts and stops, sorted

    @property
    def nbytes(self) -> int:
        return sum(encoded.numel() for _, encoded in self._sets)

    @property
    def is_marked(self) -> bool:
        """Whether a position changed. Before `compact`."""
        return bool(self._ranges) or any(bool(bits.any()) for _, bits in self._sets[:1])

    def add(self, start: int, changed: Tensor, far: Tensor) -> None:
        """Add what an update changed, by masks on the CPU that begin at ``start``."""
        stop = start + changed.numel()
        place = bisect_right(self._written, start, key=itemgetter(1))
        is_again = place < len(self._written) and self._written[place][0] < stop
        if is_again or not self._written:  # the next update begins where two writes overlap
            self.num_updates += 1
            self._written, place = [], 0
        self._written.insert(place, (start, stop))
        if not self._sets:
            size = num_bits_bytes(self._numel)
            self._sets = [(Kind.BITS, torch.zeros(size, dtype=torch.uint8)) for _ in range(2)]
        for (_, bits), mask in zip(self._sets, (changed, far), strict=True):
            before = start % 8
            packed = pack_bits(torch.nn.functional.pad(mask, (before, 0)) if before else mask)
            bits[start // 8 : start // 8 + packed.numel()] |= packed

    def add_range(self, start: int, stop: int) -> None:
        """Add ``[start, stop)``, whose values may be any."""
        if (start, stop) not in self._ranges:
            self._ranges.append((start, stop))

    def compact(self) -> None:
        """End the version: gaps replace bits where they are shorter. Nothing is added any more."""
        self._written = []
        for number, (_, bits) in enumerate(self._sets):
            kind, encoded = encode(unpack_bits(bits, self._numel))
            if kind is Kind.GAPS:
                self._sets[number] = kind, encoded
        if self._sets and self._sets[1][1].numel() > self._numel // 32:
            del self._sets[1]  # many moved far: a set of its own costs more than it saves

    def mark(self, changed: Tensor, far: Tensor) -> None:
        """Set the bool masks of the shard, on the CPU, at the positions of the two sets."""
        for mask, number in ((changed, 0), (far, -1)):
            for start, stop in self._ranges:
                mask[start:stop] = True
            if self._sets:
                kind, encoded = self._sets[number]
                if kind is Kind.BITS:
                    mask |= unpack_bits(encoded, self._numel)
                else:
                    mask[decode_gaps(encoded)] = True


class ChangeLog:
    """Writes compared shards, and remembers what changed since version ``oldest``."""

    def __init__(
        self,
        shards: Mapping[int, tuple[int, Tensor, tuple[int, int]]],
        spans: Sequence[tuple[int, int]],
        store: ParamStore | None,
        *,
        num_versions: int,
        max_bytes: int | None,
    ) -> None:
        """Start without changes.

        ``shards`` has, of each compared segment: where its updated part begins in the local flat
        space, that part, and the range of it that is this rank's slice of the segment. ``spans``
        has start and segment of all trainable segments, sorted. ``store`` takes the values of
        shards that are not compared and on the meta device.
        """
        self.version = self.oldest = 0  # the newest version
        self._shards = dict(shards)
        self._spans = spans
        self._store = store
        self._num_versions = num_versions
        self._max_bytes = max_bytes
        self._open: dict[int, ShardChanges] = {}
        self._closed: list[dict[int, ShardChanges]] = []  # of the versions after `oldest`
        self._seen: dict[int, int] = {}  # version of the flat parameters that are not compared
        self._lock = threading.Lock()

    # ------------------------------------------------------------- while training

    @torch.no_grad()
    def write(self, start: int, values: Tensor) -> None:
        """Overwrite new values, by the state tier: see `zero_core.protocols.ParamStore`."""
        _, segment = self._spans[bisect_right(self._spans, start, key=itemgetter(0)) - 1]
        if segment not in self._shards:
            assert self._store is not None, "whoever gives meta shards gives a store"
            self._store.write(start, values)
            return
        base, target, (own_start, own_stop) = self._shards[segment]
        is_elsewhere = values.device != target.device and target.device.type != "cpu"
        if is_elsewhere:  # a thread of the host writes: it is not ordered by the readers' streams
            torch.accelerator.synchronize(target.device)
        length = _CPU_NUMEL if target.is_cpu else _DEVICE_NUMEL
        for begin in range(0, values.numel(), length):
            new = values[begin : begin + length]
            first = start - base + begin
            old = target[first : first + new.numel()]
            new = new.to(old.device, old.dtype)
            low, high = max(first, own_start), min(first + old.numel(), own_stop)
            if low < high:  # at stage 0 other ranks have written the same elsewhere
                part = slice(low - first, high - first)
                masks = compare(old[part], new[part])
                with self._lock:
                    changes = self._open.setdefault(segment, ShardChanges(own_stop - own_start))
                    changes.add(low - own_start, *(mask.cpu() for mask in masks))
            old.copy_(new)
        if is_elsewhere:
            torch.accelerator.synchronize(target.device)

    # ------------------------------------------------------------ between two steps

    def restart(self, params: Sequence[FlatParams]) -> None:
        """Forget everything: the current values are those of the newest version."""
        self.collect(params)
        with self._lock:
            self._open, self._closed = {}, []
        self.oldest = self.version

    def collect(self, params: Sequence[FlatParams]) -> bool:
        """Note which other shards changed. Return whether anything did since the last version."""
        for flat in params:
            segment = flat.segment
            low, high = segment.shard_range(flat.rank)
            ranges = [(segment.slots[p].start, segment.slots[p].stop) for p in flat.edited]
            flat.edited.clear()
            if segment.is_trainable and segment.index not in self._shards:
                if self._seen.get(segment.index) != flat.version:
                    ranges = [(low, high)]
                self._seen[segment.index] = flat.version
            for start, stop in ranges:
                first, last = max(start, low), min(stop, high)
                if first < last:
                    changes = self._open.setdefault(segment.index, ShardChanges(high - low))
                    changes.add_range(first - low, last - low)
        return any(changes.is_marked for changes in self._open.values())

    def close(self) -> None:
        """End the version that is open."""
        with self._lock:
            closed, self._open = self._open, {}
        for changes in closed.values():
            changes.compact()
        self._closed.append(closed)
        self.version += 1
        while len(self._closed) > self._num_versions or (
            self._max_bytes is not None and self.nbytes > self._max_bytes and self._closed
        ):
            self._closed.pop(0)
            self.oldest += 1

    @property
    def nbytes(self) -> int:
        """Bytes of the positions."""
        return sum(m.nbytes for of in (*self._closed, self._open) for m in of.values())

    def changed(self, segment: int, since: int, numel: int) -> tuple[Tensor, Tensor, int] | None:
        """Return which of a shard's ``numel`` elements changed after version ``since``, or None.

        A mask of those that moved by `NEAR` at most in each of several updates, a mask of the
        other ones, and the number of the updates.
        """
        assert since >= self.oldest, "checked by the caller, for all ranks"
        with self._lock:
            versions = chain(self._closed[since - self.oldest :], [self._open])
            found = [of[segment] for of in versions if segment in of]
        if not found:
            return None
        changed, far = (torch.zeros(numel, dtype=torch.bool) for _ in range(2))
        for changes in found:
            changes.mark(changed, far)
        return changed & ~far, far, sum(changes.num_updates for changes in found)
