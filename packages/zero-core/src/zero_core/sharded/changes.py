"""Log of the published values that changed, for patches of the weights, and its encodings.

[Note: versions]
A *version* is the state of the compute weights when a patch was written: version 0 is that of the
engine's start. What changes between two of them belongs to the later one. The log keeps the
positions, not the values: a patch has the newest values at all positions that changed since the
receiver's version. A position that is logged late, or twice, only makes a patch longer.

While a version is open a compared shard has two bits per element: a weight that changed, and one
that moved far. Afterwards it has about a byte per changed weight, and a bit and a quarter at most.

[Note: how changes are found]
A *compared* shard is 16-bit, and is not its own master weight. The state tier does not write it: it
sees a shard on the meta device, and hands new values to this log as to any
`zero_core.protocols.ParamStore`. The old ones are in the shard until they are overwritten here, and
both are compared in the cache. Every other trained shard counts as changed whenever it was updated:
in fp32 nearly all values do change in a step. Values written from outside of a step (checkpoints of
frozen parameters, ``gathered``) are noted by parameter: `FlatParams.edit`.

[Note: positions]
A set of positions in ``[0, numel)`` is encoded as one of

- *gaps*: uint8. Each position is the number of unchanged ones since the last one; 255 stands for
  255 of them and no position. About a byte per position where a fiftieth or less is in the set.
- *bits*: uint8, one bit per position, the lowest first.
- *all*: nothing.

[Note: low bits]
A changed 16-bit value is mostly a neighbour of the old one. *Ordered*, as the integers that count
the values of a dtype from the lowest on, both then differ by little, and the lowest bits of the new
one are enough for somebody who has the old one, or any in between: the new one is the nearest with
these bits. 4 bits serve a distance up to 7, and 8 bits one up to 127. So for a few updates it is
logged how far values have moved: where none was by more than `NEAR`, a patch has low bits alone.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import chain
from operator import itemgetter

import torch
from torch import Tensor

from zero_core.core.params import FlatParams
from zero_core.protocols import ParamStore

_CPU_NUMEL = 1 << 18  # old and new values of so many elements fit a core's cache
_DEVICE_NUMEL = 1 << 25
_MORE = 255
# Gathers the lowest bits of the 8 bytes of an int64 in its highest byte.
_GATHER_BITS = 0x0102040810204080


class Kind(StrEnum):
    """Encoding of a set of positions: see [Note: positions]."""

    GAPS = "gaps"
    BITS = "bits"
    ALL = "all"


class Form(StrEnum):
    """Part of the values that is sent."""

    VALUES = "values"
    LOW4 = "low4"
    LOW8 = "low8"

    @property
    def num_bits(self) -> int:
        return 4 if self is Form.LOW4 else 8


NEAR = 7  # largest distance at which a change is near


def form_of(num_changes: int, value_bytes: int) -> Form:
    """Return what is to be sent of values that changed ``num_changes`` times by `NEAR` at most."""
    if value_bytes != 2:
        return Form.VALUES
    if num_changes <= 1:
        return Form.LOW4
    return Form.LOW8 if num_changes * NEAR < 128 else Form.VALUES


def _ordered(values: Tensor) -> Tensor:
    bits = values.view(torch.int16).to(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFF, bits)


def to_low_bits(values: Tensor, form: Form) -> Tensor:
    """Return the lowest bits of 16-bit ``values``, uint8: in `Form.LOW4` two in a byte."""
    ordered = _ordered(values)
    if form is Form.LOW8:
        return (ordered & 0xFF).to(torch.uint8)
    padded = torch.nn.functional.pad(ordered & 0xF, (0, ordered.numel() % 2))
    return (padded[0::2] | padded[1::2] << 4).to(torch.uint8)


def from_low_bits(old: Tensor, codes: Tensor, form: Form) -> Tensor:
    """Return the values next to ``old``, 16-bit, that have the lowest bits ``codes``."""
    low = codes.to(torch.int32)
    if form is Form.LOW4:
        low = torch.stack([low & 0xF, low >> 4], 1).view(-1)[: old.numel()]
    ordered, half = _ordered(old), 1 << (form.num_bits - 1)
    new = ordered + ((low - ordered + half) & (2 * half - 1)) - half
    bits = torch.where(new < 0, new ^ 0x7FFF, new)
    return bits.to(torch.int16).view(old.dtype)


def compare(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Return masks of where two 1-D tensors of a 16-bit dtype differ in a bit, and of where by far.

    The latter has all positions whose values are further apart than `NEAR`, and those that changed
    their sign. Its cost does not depend on how many there are.
    """
    # Of magnitudes, if signs are equal. Integers, as torch's comparisons take 5 times as long.
    one, two = old.view(torch.int16), new.view(torch.int16)
    distance = two - one
    changed = distance.neg().bitwise_or_(distance)
    above = distance.add_(NEAR)
    far = above.neg().add_(2 * NEAR).bitwise_or_(above).bitwise_or_(two ^ one)
    return _is_negative(changed), _is_negative(far)


def _is_negative(values: Tensor) -> Tensor:
    """Return a mask of the negative int16 ``values``, which are overwritten."""
    return values.bitwise_right_shift_(15).to(torch.int8).bitwise_and_(1).view(torch.bool)


def encode_gaps(positions: Tensor) -> Tensor:
    """Return ``positions`` (int64, in order, on the CPU) as gaps."""
    gaps = torch.diff(positions, prepend=torch.tensor([-1])) - 1
    wide = gaps // _MORE
    if not bool(wide.any()):
        return gaps.to(torch.uint8)
    ends = (wide + 1).cumsum(0) - 1
    encoded = torch.full((int(ends[-1]) + 1,), _MORE, dtype=torch.uint8)
    encoded[ends] = (gaps % _MORE).to(torch.uint8)
    return encoded


def decode_gaps(encoded: Tensor) -> Tensor:
    """Return the positions that gaps stand for: int64."""
    is_end = encoded != _MORE
    passed = encoded.cumsum(0, dtype=torch.int64)[is_end]
    return passed + torch.arange(passed.numel())


def pack_bits(mask: Tensor) -> Tensor:
    """Return a 1-D bool ``mask`` as bits."""
    if mask.numel() % 8 or mask.storage_offset() % 8:  # of no int64
        mask = torch.nn.functional.pad(mask, (0, -mask.numel() % 8))  # a copy
    words = mask.view(torch.int64) * _GATHER_BITS
    return (words >> 56).to(torch.uint8)


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """Return the first ``numel`` of bits as a bool mask."""
    bits = torch.arange(8, dtype=torch.uint8)
    return ((packed[:, None] >> bits) & 1).view(-1)[:numel].bool()


def encode(mask: Tensor, value_bytes: int | None = None) -> tuple[Kind, Tensor]:
    """Return the shortest encoding of the positions that ``mask`` has.

    If ``value_bytes`` is given, others may be added: so many bytes go with each position, and all
    of them may be shorter than bits and those that are meant.
    """
    positions = mask.nonzero().view(-1)
    numel, count = mask.numel(), positions.numel()
    num_bits = -(-numel // 8)  # in bytes
    size = value_bytes or 0
    if count == numel or (size and (numel - count) * size <= min(num_bits, count)):
        return Kind.ALL, torch.empty(0, dtype=torch.uint8)
    if count < num_bits:
        gaps = encode_gaps(positions)
        if gaps.numel() <= num_bits:
            return Kind.GAPS, gaps
    return Kind.BITS, pack_bits(mask)


def decode(kind: Kind, encoded: Tensor, numel: int) -> Tensor | slice:
    """Return what `encode` encoded as an index: positions, or a slice for all."""
    if kind is Kind.ALL:
        if not encoded.numel():
            return slice(0, numel)
    else:
        if kind is Kind.BITS:
            is_whole = encoded.numel() == -(-numel // 8)
            positions = unpack_bits(encoded, encoded.numel() * 8).nonzero().view(-1)
        else:
            is_whole = not encoded.numel() or int(encoded[-1]) != _MORE
            positions = decode_gaps(encoded)
        if is_whole and (not positions.numel() or int(positions[-1]) < numel):
            return positions
    raise ValueError(f"{encoded.numel()} bytes of {kind} encode no positions below {numel}")


class ShardChanges:
    """Positions of the elements of a shard, of ``numel``, that one version changed.

    They are two sets: all of them, and those moved by more than `NEAR` at once.
    """

    def __init__(self, numel: int) -> None:
        self.num_updates = 0  # how often a value may have changed
        self._numel = numel
        self.ranges: set[tuple[int, int]] = set()  # in both sets: starts and stops
        self._sets: list[tuple[Kind, Tensor]] = []  # the rest of each. One set: all moved far
        self._written: list[tuple[int, int]] = []  # by the last update: starts and stops, sorted

    @property
    def nbytes(self) -> int:
        return sum(encoded.numel() for _, encoded in self._sets)

    @property
    def is_marked(self) -> bool:
        """Whether a position changed. Before `compact`."""
        return bool(self.ranges) or any(bool(bits.any()) for _, bits in self._sets[:1])

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
            size = -(-self._numel // 8)
            self._sets = [(Kind.BITS, torch.zeros(size, dtype=torch.uint8)) for _ in range(2)]
        for (_, bits), mask in zip(self._sets, (changed, far), strict=True):
            before = start % 8
            packed = pack_bits(torch.nn.functional.pad(mask, (before, 0)) if before else mask)
            bits[start // 8 : start // 8 + packed.numel()] |= packed

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
            for start, stop in self.ranges:
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
                    changes.ranges.add((first - low, last - low))
        return any(changes.is_marked for changes in self._open.values())

    def close(self) -> None:
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
