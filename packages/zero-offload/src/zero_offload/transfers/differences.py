"""Lossless differences of new parameters, for shards that hold what the host sent last.

[Note: what a difference starts from]
The host keeps the values that it sent last. Other code may have written to the shard since: an edit
of a weight, or a copy back after the device's memory was given away. So while the host updates, the
device computes a checksum of the values that are about to change. The host compares it with that of
the values that it keeps. Where the two are equal it sends what changed, else the new values: the
shard holds the same bits afterwards.

A long span is sent in several parts. Each passes through one of two buffers: the host encodes into
one while the other is copied to the device. Short parts are sent whole, without a checksum. So are
up to three elements at either end of a span, such that the others are whole words of a checksum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from importlib.metadata import entry_points
from itertools import cycle, pairwise
from time import perf_counter

import torch
from torch import Tensor

from zero_offload.flat.geometry import Geometry
from zero_offload.flat.intervals import SpanMap
from zero_offload.memory.host_memory import HostMemory
from zero_offload.memory.streams import Checksum, HostStreams
from zero_offload.protocols import UploadCodec
from zero_offload.threads import num_kernel_threads

GROUP = "zero_core.upload_codecs"
SHORTEST_NBYTES = 1 << 16
"""Least bytes of new values that are worth a checksum."""
NUM_BUFFERS = 2
_WORD_NUMEL = 4
"""Elements of 16 bits in a word of a checksum."""
_NUM_CHECKSUMS = 64
"""Checksums that memory is allocated for at once."""


def resolve_upload_codec(codec: UploadCodec | str | None) -> UploadCodec | None:
    """Return a codec, given as an object, as the name of an installed one, or as None."""
    if isinstance(codec, str):
        found = tuple(entry_points(group=GROUP, name=codec))
        if not found:
            installed = sorted(entry.name for entry in entry_points(group=GROUP))
            raise ValueError(
                f"no upload codec {codec!r} is installed, only {installed}; `pip install "
                'zero-offload[zero-comm]` brings "lossless"'
            )
        codec = found[0].load()()
    if codec is not None and not isinstance(codec, UploadCodec):
        raise ValueError(
            f"an upload codec needs max_nbytes, checksum, encode and decode; {codec!r} lacks some"
        )
    return codec


def part_numel(published_numel: int) -> int:
    """Return the most elements of a difference: with its overhead no longer than a whole run."""
    numel = published_numel - published_numel // 16
    return max(numel - numel % _WORD_NUMEL, _WORD_NUMEL)


def is_kept(shard: Tensor) -> bool:
    """Whether a shard is long enough that parts of it may be sent as differences."""
    return shard.numel() * shard.element_size() >= SHORTEST_NBYTES


class _Buffer:
    """Host memory of one difference, until ``sent`` has fired."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.sent: torch.Event | None = None


class UploadDifferences:
    """Keeps the values that were sent last, and sends what changed. See the module.

    Used by one thread at a time. New values are copied to the shards with the indices ``staged``.

    Attributes:
        num_bytes: bytes of host memory for the values that were sent last.
        num_differences: parts that were sent as differences.
        num_changed: parts that were sent whole because the device did not have what was sent last.
        waited_s: seconds for which the caller waited for checksums and for copies to the device.
    """

    def __init__(
        self,
        geometry: Geometry,
        staged: Collection[int],
        codec: UploadCodec,
        memory: HostMemory,
        streams: HostStreams,
    ) -> None:
        self.num_differences = 0
        self.num_changed = 0
        self.waited_s = 0.0
        self._geometry = geometry
        self._codec = codec
        self._memory = memory
        self._streams = streams
        # Pageable, as it is never sent. The first values are written to untouched zeros.
        self._kept = {
            index: torch.zeros(shard.numel(), dtype=shard.dtype, device="cpu")
            for index, (_, shard) in enumerate(geometry.shards)
            if index in staged and is_kept(shard) and codec.max_nbytes(1, shard.element_size())
        }
        self.num_bytes = sum(kept.nbytes for kept in self._kept.values())
        self._part_numel = part_numel(geometry.published_numel)
        room = max((self._room(kept) for kept in self._kept.values()), default=0)
        rooms = [memory.empty(room, torch.uint8) for _ in range(NUM_BUFFERS)]
        self._buffers = cycle([_Buffer(room) for room in rooms])
        if room:
            streams.reserve_difference(room)
        self._checksums: dict[int, Checksum] = {}  # by the first element of the part
        self._free_values: list[Tensor] = []  # host memory of checksums
        if self._kept:
            self._add_values()
        self._sent: SpanMap[torch.Event] = SpanMap()

    def _room(self, values: Tensor) -> int:
        """Return the most bytes of a difference of ``values``, or of their longest part."""
        numel = min(values.numel(), self._part_numel)
        return self._codec.max_nbytes(numel, values.element_size())

    def _add_values(self) -> None:
        self._free_values += self._memory.empty(_NUM_CHECKSUMS, torch.int64).unbind()

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, Tensor | None]]:
        """Yield the parts of a span, with what is kept of each: None for shards without it."""
        index = self._geometry.shard_at(start)
        base, kept = self._geometry.shards[index][0], self._kept.get(index)
        if kept is None:
            yield start, stop, None
            return
        first = min(start + (base - start) % _WORD_NUMEL, stop)
        last = max(stop - (stop - base) % _WORD_NUMEL, first)
        bounds = [start, *range(first, last, self._part_numel), last, stop]
        for low, high in pairwise(bounds):
            if low < high:
                yield low, high, kept[low - base : high - base]

    def open(self, start: int, stop: int) -> None:
        """Start to compute checksums of a span that is going to be updated."""
        for low, high, kept in self._parts(start, stop):
            if kept is None or not is_kept(kept):
                continue
            if not self._free_values:
                self._add_values()
            earlier = [event for *_, event in self._sent.overlaps(low, high)]
            view = self._geometry.view(low, high)
            value = self._free_values.pop()
            self._checksums[low] = self._streams.checksum(self._codec, view, value, earlier)

    def send(self, start: int, view: Tensor, values: Tensor) -> tuple[torch.Event | None, int]:
        """Send a span that was opened: its new values, in host memory until the event fires.

        Return an event that fires when they have arrived, None if they have, and the bytes sent.
        """
        event, nbytes = None, 0
        for low, high, kept in self._parts(start, start + view.numel()):
            part = slice(low - start, high - start)
            if kept is None:
                event, sent = self._streams.to_device(view[part], values[part]), values[part].nbytes
            else:
                event, sent = self._send_part(low, view[part], values[part], kept)
                if event is not None:
                    self._sent.put(low, high, event)
            nbytes += sent
        return event, nbytes

    def _send_part(
        self, start: int, view: Tensor, values: Tensor, kept: Tensor
    ) -> tuple[torch.Event | None, int]:
        checksum = self._checksums.pop(start, None)  # None: it is short
        nbytes = values.nbytes
        if checksum is not None:
            self._wait(checksum.event)
            self._free_values.append(checksum.value)
            if int(checksum.value) == int(self._codec.checksum(kept)):  # the device has ``kept``
                buffer = next(self._buffers)
                self._wait(buffer.sent)
                room = buffer.memory[: self._room(values)]
                nbytes = self._codec.encode(kept, values, room, num_threads=num_kernel_threads())
            else:
                self.num_changed += 1
        kept.copy_(values)
        if nbytes >= values.nbytes:
            return self._streams.to_device(view, values), values.nbytes
        buffer.sent = self._streams.difference_to_device(self._codec, view, room[:nbytes])
        self.num_differences += 1
        return buffer.sent, nbytes

    def _wait(self, event: torch.Event | None) -> None:
        if event is not None:
            started = perf_counter()
            self._streams.wait(event)
            self.waited_s += perf_counter() - started
