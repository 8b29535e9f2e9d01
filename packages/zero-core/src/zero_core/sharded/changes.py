"""Log of changed weights for incremental weight patches, and encodings of the changes.

[Note: versions]
A *version* is the state of the compute weights when a patch was written. Version 0 is the state
when the engine starts. A change between two versions belongs to the later one. The log stores
positions, not values. A patch contains the newest values at all positions that changed since the
receiver's version. Logging the position of an unchanged value only makes a patch longer.

[Note: how changes are found]
A *compared* shard is 16-bit and separate from its master weights. The state tier does not write the
shard directly. The tier is given a shard on the meta device and passes new values to this log, as
to any `zero_core.protocols.ParamStore`. The log compares them with the old values in the shard, in
cache-sized chunks, and then overwrites the shard. Any other trained shard counts as changed when it
is updated, because nearly all fp32 values change in a step. Values written outside of a step
(checkpoints of frozen parameters, ``gathered``) are recorded per parameter: `FlatParams.edit`.

[Note: positions]
A set of positions in ``[0, numel)`` is encoded in one of three ways:

- *gaps*: uint8. For each position, the number of elements between it and the previous position. 255
  stands for 255 elements that no position follows. Needs about a byte per position if at least a
  fiftieth of the elements is in the set.
- *bits*: uint8, one bit per element, lowest bit first.
- *all*: empty. All elements are in the set.

[Note: low bits]
A changed 16-bit value is usually close to the old one. *Ordered* values are integers that number
the values of a dtype in increasing order. Old and new ordered values differ by little, so the
lowest bits of the new value are enough for a receiver that has the old value or one in between: the
new value is the nearest one with these bits. 4 bits cover a distance up to 7, 8 bits up to 127. So
the log records which values moved farther than `NEAR` in an update. Of the other changed values, a
patch over few updates contains only low bits.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from itertools import chain
from operator import itemgetter

import torch
from torch import Tensor

from zero_core.core.params import FlatParams
from zero_core.protocols import ParamStore

_CPU_NUMEL = 1 << 18  # so that old and new values fit into a core's cache
_DEVICE_NUMEL = 1 << 25
_MORE = 255
# Multiplier that gathers the lowest bits of an int64's 8 bytes in its highest byte.
_GATHER_BITS = 0x0102040810204080


class Kind(StrEnum):
    """Encoding of a set of positions. See [Note: positions]."""

    GAPS = "gaps"
    BITS = "bits"
    ALL = "all"


class Form(StrEnum):
    """Encoding of the values in a patch: whole, or only low bits. See [Note: low bits]."""

    VALUES = "values"
    LOW4 = "low4"
    LOW8 = "low8"

    @property
    def num_bits(self) -> int:
        return 4 if self is Form.LOW4 else 8


NEAR = 7  # largest distance of ordered values in a near change


def form_of(num_changes: int, value_bytes: int) -> Form:
    """Return the encoding of values after ``num_changes`` changes, each by at most `NEAR`."""
    if value_bytes != 2:
        return Form.VALUES
    if num_changes <= 1:
        return Form.LOW4
    return Form.LOW8 if num_changes * NEAR < 128 else Form.VALUES


def _ordered(values: Tensor) -> Tensor:
    bits = values.view(torch.int16).to(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFF, bits)


def to_low_bits(values: Tensor, form: Form) -> Tensor:
    """Return low bits ([Note: low bits]) of 16-bit ``values``: uint8, in LOW4 two per byte."""
    ordered = _ordered(values)
    if form is Form.LOW8:
        return (ordered & 0xFF).to(torch.uint8)
    padded = torch.nn.functional.pad(ordered & 0xF, (0, ordered.numel() % 2))
    return (padded[0::2] | padded[1::2] << 4).to(torch.uint8)


def from_low_bits(old: Tensor, codes: Tensor, form: Form) -> Tensor:
    """Return the values nearest to ``old`` (16-bit) whose low bits are ``codes``."""
    low = codes.to(torch.int32)
    if form is Form.LOW4:
        low = torch.stack([low & 0xF, low >> 4], 1).view(-1)[: old.numel()]
    ordered, half = _ordered(old), 1 << (form.num_bits - 1)
    new = ordered + ((low - ordered + half) & (2 * half - 1)) - half
    bits = torch.where(new < 0, new ^ 0x7FFF, new)
    return bits.to(torch.int16).view(old.dtype)


def compare(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Compare two 1-D tensors of a 16-bit dtype. Return masks of changed and of far elements.

    Far elements differ by more than `NEAR`, or in sign.
    """
    # Distances of magnitudes, valid for equal signs. Uses integer operations, because torch's
    # comparisons take 5 times as long.
    one, two = old.view(torch.int16), new.view(torch.int16)
    distance = two - one
    changed = distance.neg().bitwise_or_(distance)
    above = distance.add_(NEAR)
    far = above.neg().add_(2 * NEAR).bitwise_or_(above).bitwise_or_(two ^ one)
    return _is_negative(changed), _is_negative(far)


def _is_negative(values: Tensor) -> Tensor:
    """Return a mask of negative int16 ``values``. Overwrites ``values``."""
    return values.bitwise_right_shift_(15).to(torch.int8).bitwise_and_(1).view(torch.bool)


def encode_gaps(positions: Tensor) -> Tensor:
    """Encode ``positions`` (int64, sorted, on the CPU) as gaps."""
    gaps = torch.diff(positions, prepend=torch.tensor([-1])) - 1
    wide = gaps // _MORE
    if not bool(wide.any()):
        return gaps.to(torch.uint8)
    ends = (wide + 1).cumsum(0) - 1
    encoded = torch.full((int(ends[-1]) + 1,), _MORE, dtype=torch.uint8)
    encoded[ends] = (gaps % _MORE).to(torch.uint8)
    return encoded


def decode_gaps(encoded: Tensor) -> Tensor:
    """Return the positions encoded as gaps, int64."""
    is_end = encoded != _MORE
    passed = encoded.cumsum(0, dtype=torch.int64)[is_end]
    return passed + torch.arange(passed.numel())


def pack_bits(mask: Tensor, before: int = 0) -> Tensor:
    """Pack a 1-D bool ``mask`` into bits, uint8, after ``before`` zero bits."""
    numel = before + mask.numel()
    if before or numel % 8 or mask.storage_offset() % 8:  # cannot be viewed as int64
        mask = torch.nn.functional.pad(mask, (before, -numel % 8))  # copies the mask
    words = mask.view(torch.int64) * _GATHER_BITS
    return (words >> 56).to(torch.uint8)


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """Return the first ``numel`` packed bits as a bool mask."""
    bits = torch.arange(8, dtype=torch.uint8)
    return ((packed[:, None] >> bits) & 1).view(-1)[:numel].bool()


def encode(mask: Tensor, value_bytes: int | None = None) -> tuple[Kind, Tensor]:
    """Return the shortest encoding of the positions in ``mask``.

    With ``value_bytes``, the size of the value sent for each position, the encoding may be
    `Kind.ALL` if that makes positions and values together shorter.
    """
    positions = mask.nonzero().view(-1)
    numel, count = mask.numel(), positions.numel()
    num_bits = -(-numel // 8)  # bytes of the bits encoding
    size = value_bytes or 0
    if count == numel or (size and (numel - count) * size <= min(num_bits, count)):
        return Kind.ALL, torch.empty(0, dtype=torch.uint8)
    if count < num_bits:
        gaps = encode_gaps(positions)
        if gaps.numel() <= num_bits:
            return Kind.GAPS, gaps
    return Kind.BITS, pack_bits(mask)


def decode(kind: Kind, encoded: Tensor, numel: int) -> Tensor | slice:
    """Decode a result of `encode` to an index. Raises ValueError if ``encoded`` is not valid."""
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
    """Positions that one version changed in a shard of ``numel`` elements.

    Two sets are stored: all changed positions, and those moved by more than `NEAR` in one update.
    """

    def __init__(self, numel: int) -> None:
        self.num_updates = 0  # upper bound of how often an element changed
        self._numel = numel
        self.ranges: set[tuple[int, int]] = set()  # (start, stop) ranges that are in both sets
        self._sets: list[tuple[Kind, Tensor]] = []  # both sets, except ``ranges``
        self._written: list[tuple[int, int]] = []  # (start, stop) of the last update's writes

    @property
    def nbytes(self) -> int:
        return sum(encoded.numel() for _, encoded in self._sets)

    @property
    def is_marked(self) -> bool:
        """Whether a position changed. Valid before `compact`."""
        return bool(self.ranges) or any(bool(bits.any()) for _, bits in self._sets[:1])

    def add(self, start: int, stop: int, masks: Sequence[Tensor]) -> None:
        """Add the changes of an update to elements ``[start, stop)``.

        ``masks``: the bits of both sets, on the CPU, from element ``start // 8 * 8`` on.
        """
        place = bisect_right(self._written, start, key=itemgetter(1))
        is_again = place < len(self._written) and self._written[place][0] < stop
        if is_again or not self._written:  # overlapping writes mean a new update
            self.num_updates += 1
            self._written, place = [], 0
        self._written.insert(place, (start, stop))
        if not self._sets:
            size = -(-self._numel // 8)
            self._sets = [(Kind.BITS, torch.zeros(size, dtype=torch.uint8)) for _ in range(2)]
        for (_, bits), packed in zip(self._sets, masks, strict=True):
            bits[start // 8 : start // 8 + packed.numel()] |= packed

    def compact(self) -> None:
        """End the version: encode sets as gaps where shorter. Afterwards nothing may be added."""
        self._written = []
        for number, (_, bits) in enumerate(self._sets):
            kind, encoded = encode(unpack_bits(bits, self._numel))
            if kind is Kind.GAPS:
                self._sets[number] = kind, encoded
        if self._sets and self._sets[1][1].numel() > self._numel // 32:
            del self._sets[1]  # if many moved far, a second set costs more than it saves

    def mark(self, changed: Tensor, far: Tensor) -> None:
        """Set the masks (bool, on the CPU, of the whole shard) at the positions of both sets."""
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
    """Log of the changes since version ``oldest``. It also writes the compared shards."""

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

        ``shards``, for each compared segment: where its updated part starts in the local flat
        space, the part, and the range of the part that is this rank's slice of the segment.
        ``spans``: start and segment of all trainable segments, sorted. ``store`` receives the
        values of meta-device shards whose segments are not compared.
        """
        self.version = self.oldest = 0  # newest version, and oldest that a patch can start from
        self._shards = dict(shards)
        self._spans = spans
        self._store = store
        self._num_versions = num_versions
        self._max_bytes = max_bytes
        self._open: dict[int, ShardChanges] = {}
        self._closed: list[dict[int, ShardChanges]] = []  # one entry per version after `oldest`
        self._seen: dict[int, int] = {}  # by segment not compared: its version at `collect`
        self._lock = threading.Lock()
        # Bits that a device copies to the host: the copy's end, and a call that adds them.
        self._arriving: deque[tuple[torch.Event, Callable[[], None]]] = deque()

    # ------------------------------------------------------ called during a step

    @torch.no_grad()
    def write(self, start: int, values: Tensor) -> None:
        """Overwrite values on behalf of the state tier: see `zero_core.protocols.ParamStore`."""
        _, segment = self._spans[bisect_right(self._spans, start, key=itemgetter(0)) - 1]
        if segment not in self._shards:
            assert self._store is not None, "whoever gives meta shards gives a store"
            self._store.write(start, values)
            return
        base, target, (own_start, own_stop) = self._shards[segment]
        is_elsewhere = values.device != target.device and target.device.type != "cpu"
        if is_elsewhere:  # a host thread writes: no stream orders its writes
            torch.accelerator.synchronize(target.device)
        length = _CPU_NUMEL if target.is_cpu else _DEVICE_NUMEL
        for begin in range(0, values.numel(), length):
            new = values[begin : begin + length]
            first = start - base + begin
            old = target[first : first + new.numel()]
            new = new.to(old.device, old.dtype)
            low, high = max(first, own_start), min(first + old.numel(), own_stop)
            if low < high:  # the other ranks record their slices
                part = slice(low - first, high - first)
                span = low - own_start, high - own_start
                masks = [pack_bits(m, span[0] % 8) for m in compare(old[part], new[part])]
                # Masks on a device are copied to pinned memory, and the host does not wait.
                bits = [mask.to("cpu", non_blocking=True) for mask in masks]
                with self._lock:
                    changes = self._open.setdefault(segment, ShardChanges(own_stop - own_start))
                    if target.is_cpu:
                        changes.add(*span, bits)
                    else:
                        copied = torch.accelerator.current_stream(target.device).record_event()
                        self._arriving.append((copied, partial(changes.add, *span, bits)))
            old.copy_(new)
        if is_elsewhere:
            torch.accelerator.synchronize(target.device)
        self._add_arrived()

    def _add_arrived(self) -> None:
        with self._lock:
            while self._arriving and self._arriving[0][0].query():
                self._arriving.popleft()[1]()

    # --------------------------------------------------- called between two steps

    def restart(self, params: Sequence[FlatParams]) -> None:
        """Forget all changes. The current values become those of the newest version."""
        self.collect(params)
        with self._lock:
            self._open, self._closed = {}, []
        self.oldest = self.version

    def collect(self, params: Sequence[FlatParams]) -> bool:
        """Record changes made without `write`. Return whether values changed after ``version``."""
        with self._lock:
            arriving = [*self._arriving]
        for copied, _ in arriving:
            copied.synchronize()
        self._add_arrived()
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

        Returns a mask of elements that moved by at most `NEAR` in each update, a mask of the other
        changed elements, and an upper bound of the number of updates.
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
