"""New parameters go up as lossless differences, where the device has what the host sent last.

[Note: what a difference starts from]
The host keeps the values that it sent last. Other code may have written to the shard since: an edit
of a weight, or a copy back after the device's memory was given away. So while the host updates, the
device computes a checksum of the values that are about to change. The host compares it with that of
the values that it keeps. Where the two are equal it sends what changed, else the new values: the
shard holds the same bits afterwards.

A long span is sent in several parts. Each passes through one of two buffers: one is encoded to
while the other is sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from importlib.metadata import entry_points
from itertools import cycle

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


def resolve_upload_codec(codec: UploadCodec | str | None) -> UploadCodec | None:
    """Return a codec, given as an object, as the name of an installed one, or as None.

    Raises:
        ValueError: none of that name is installed.
    """
    if not isinstance(codec, str):
        return codec
    found = tuple(entry_points(group=GROUP, name=codec))
    if not found:
        installed = sorted(entry.name for entry in entry_points(group=GROUP))
        raise ValueError(
            f"no upload codec {codec!r} is installed, only {installed}; `pip install "
            'zero-offload[zero-comm]` brings "lossless"'
        )
    made: UploadCodec = found[0].load()()
    return made


def part_numel(published_numel: int) -> int:
    """Return the most elements of a difference: with its overhead no longer than a whole run."""
    return max(published_numel - published_numel // 16, 1)


class _Buffer:
    """Host memory of one difference, until ``sent`` has fired."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.sent: torch.Event | None = None


class UploadDifferences:
    """Keeps what was sent last, and sends what changed. See the module.

    Used by one thread at a time.

    Args:
        geometry: the flat space, with its shards on the device.
        staged: indices of the shards that new values are copied to.
        codec: of the differences.
        memory: allocates host memory.
        streams: of the device.

    Attributes:
        num_bytes: host memory of the values that were sent last.
        num_differences: parts that were sent as differences.
        num_changed: parts that were sent whole, as the device did not have what was sent last.
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
        self._geometry = geometry
        self._codec = codec
        self._memory = memory
        self._streams = streams
        shards = {i: shard for i, (_, shard) in enumerate(geometry.shards) if i in staged}
        # Pageable, as it is never sent. The first values are written to untouched zeros.
        self._kept = {
            index: torch.zeros(shard.numel(), dtype=shard.dtype, device="cpu")
            for index, shard in shards.items()
            if codec.max_nbytes(1, shard.element_size())
        }
        self.num_bytes = sum(kept.nbytes for kept in self._kept.values())
        self._part_numel = part_numel(geometry.published_numel)
        room = max((self._room(kept) for kept in self._kept.values()), default=0)
        self._buffers = cycle(
            [_Buffer(memory.empty(room, torch.uint8)) for _ in range(NUM_BUFFERS)]
        )
        streams.make_room(room)
        self._checks: dict[int, Checksum] = {}
        self._totals: list[Tensor] = []  # host memory of checksums, for the next ones
        self._sent: SpanMap[torch.Event] = SpanMap()

    def _room(self, values: Tensor) -> int:
        """Return the most bytes of a difference of ``values``, or of their longest part."""
        numel = min(values.numel(), self._part_numel)
        return self._codec.max_nbytes(numel, values.element_size())

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, Tensor | None]]:
        """Yield the parts of a span, with what is kept of each, or None if it is sent whole."""
        index = self._geometry.shard_at(start)
        base, kept = self._geometry.shards[index][0], self._kept.get(index)
        for low in range(start, stop, self._part_numel):
            high = min(low + self._part_numel, stop)
            part = None if kept is None else kept[low - base : high - base]
            is_short = part is None or part.nbytes < SHORTEST_NBYTES
            yield low, high, None if is_short else part

    def open(self, start: int, stop: int) -> None:
        """Start to check what the device has in a span that is going to be updated."""
        for low, high, kept in self._parts(start, stop):
            if kept is None:
                continue
            total = self._totals.pop() if self._totals else self._memory.empty(1, torch.int64)[0]
            sent = [event for *_, event in self._sent.overlaps(low, high)]
            view = self._geometry.view(low, high)
            self._checks[low] = self._streams.checksum(self._codec, view, total, sent)
            self._sent.discard(low, high)

    def send(self, start: int, view: Tensor, values: Tensor) -> tuple[torch.Event | None, int]:
        """Send a span that was opened.

        Args:
            start: its first element.
            view: the shard's elements on the device.
            values: their new values, in host memory, until the event fires.

        Returns:
            An event that fires when they have arrived, None if they have, and the bytes sent.
        """
        event, nbytes = None, 0
        for low, high, kept in self._parts(start, start + view.numel()):
            part = slice(low - start, high - start)
            event, sent = self._send_part(low, view[part], values[part], kept)
            nbytes += sent
            if event is not None and kept is not None:
                self._sent.put(low, high, event)
        return event, nbytes

    def _send_part(
        self, start: int, view: Tensor, values: Tensor, kept: Tensor | None
    ) -> tuple[torch.Event | None, int]:
        check = self._checks.pop(start, None)
        if kept is None or check is None:
            return self._streams.to_device(view, values), values.nbytes
        if self._is_what_was_sent(check, kept):
            buffer = next(self._buffers)
            if buffer.sent is not None:
                self._streams.wait(buffer.sent)
            room = buffer.memory[: self._room(values)]
            nbytes = self._codec.encode(kept, values, room, num_threads=num_kernel_threads())
            if nbytes < values.nbytes:
                kept.copy_(values)
                difference = room[:nbytes]
                buffer.sent = self._streams.difference_to_device(self._codec, view, difference)
                self.num_differences += 1
                return buffer.sent, nbytes
        else:
            self.num_changed += 1
        kept.copy_(values)
        return self._streams.to_device(view, values), values.nbytes

    def _is_what_was_sent(self, check: Checksum, kept: Tensor) -> bool:
        if check.event is not None:
            self._streams.wait(check.event)
        self._totals.append(check.total)
        return int(check.total) == int(self._codec.checksum(kept))
