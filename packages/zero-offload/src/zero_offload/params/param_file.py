"""Parameter shards in a file, read ahead of use and written back shard by shard.

[Note: buffers of the file]
read buffers   hold shards that are expected next, from the start of their read until their copy to
               the device is over.
write buffers  collect new values, which arrive piece by piece in ascending order. There are two:
one
               is filled while the other is written to the file.

[Note: threads]
The thread that computes calls `FileShards.expect` and `FileShards.fetch`, the thread that updates
calls `FileShards.write`. One lock orders them. A shard is in at most one of three states: being
read, being collected, being written. New values drop the stale ones that were read of the shard
before.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zero_offload.errors import StorageError
from zero_offload.flat.intervals import Intervals
from zero_offload.memory.host_memory import HostMemory
from zero_offload.memory.storage import BlockFile, Transfer
from zero_offload.memory.streams import Copy, start_copy

NUM_WRITE_BUFFERS = 2
"""Buffers in which new values of a shard are collected and sent to the file."""


@dataclass(slots=True)
class _Buffer:
    """Host memory, uint8, and its pending users."""

    memory: Tensor
    copy: Copy | None = None  # to the device
    transfer: Transfer | None = None  # to the file

    def free(self) -> Tensor:
        """Return the memory once it may be overwritten."""
        copy, self.copy = self.copy, None
        transfer, self.transfer = self.transfer, None
        if copy is not None:
            copy.block()
        if transfer is not None:
            transfer.wait()
        return self.memory


@dataclass(slots=True)
class _Collected:
    """New values of a shard so far."""

    segment: int
    buffer: _Buffer
    spans: Intervals = field(default_factory=Intervals)


class FileShards:
    """Parameter shards in a `BlockFile`, one block each.

    Args:
        shards: ``(segment, numel, dtype)`` of each.
        num_buffers: shards that are read ahead.
        pin_memory: page-lock the buffers for reads.

    Raises:
        ValueError: the folder is missing or not writable.
        StorageError: the disk has not the room.
    """

    def __init__(
        self,
        shards: Sequence[tuple[int, int, torch.dtype]],
        folder: str,
        *,
        num_buffers: int,
        pin_memory: bool,
    ) -> None:
        sizes = [numel * dtype.itemsize for _, numel, dtype in shards]
        self._block = {segment: index for index, (segment, _, _) in enumerate(shards)}
        self._numel = {segment: numel for segment, numel, _ in shards}
        self._dtype = {segment: dtype for segment, _, dtype in shards}
        self._memory = HostMemory(should_pin=pin_memory)
        self._pageable = HostMemory(should_pin=False)
        self.blocks = BlockFile(folder, sizes, name="parameters")
        self._lock = threading.Lock()
        self._largest = max(sizes)
        self._num_unmade = min(num_buffers, len(shards))
        self._free: list[_Buffer] = []
        self._read: dict[int, tuple[_Buffer, Transfer]] = {}
        self._collected: _Collected | None = None
        self._idle = [self._new(self._pageable) for _ in range(NUM_WRITE_BUFFERS)]
        self._written: dict[int, Transfer] = {}  # on their way to the file

    @property
    def num_buffer_bytes(self) -> int:
        """Bytes of host memory of all buffers."""
        return self._memory.num_bytes + self._pageable.num_bytes

    @property
    def read_ahead(self) -> list[int]:
        """Shards in read buffers, in the order of their reads."""
        return list(self._read)

    def block_of(self, segment: int) -> int:
        """Return the index of a shard's block in `blocks`."""
        return self._block[segment]

    def expect(self, segments: Sequence[int]) -> None:
        """Read these shards ahead, as many as there are buffers."""
        with self._lock:
            for segment in segments:
                if segment in self._read or self._is_changing(segment):
                    continue
                buffer = self._unused(segments)
                if buffer is None:
                    return
                self._start_read(segment, buffer)

    def fetch(self, segment: int, out: Tensor) -> Copy:
        """Wait for the shard's read and enqueue its copy to ``out`` on the current stream.

        Raises:
            StorageError: it cannot be read, or never reached the file.
        """
        with self._lock:
            self._complete_write(segment)
            if segment not in self._read:
                self._start_read(segment, self._unused([segment]) or self._least_needed())
            buffer, transfer = self._read.pop(segment)
        try:
            transfer.wait()  # without the lock: an update may go on meanwhile
            copy = start_copy(out, self._view(segment, buffer))
            buffer.copy = copy
        finally:
            with self._lock:
                self._free.append(buffer)
        return copy

    def write(self, segment: int, start: int, values: Tensor) -> None:
        """Collect new values of a part of a shard, to be written to the file later.

        Raises:
            StorageError: earlier values could not be written.
        """
        with self._lock:
            if self._collected is not None and self._collected.segment != segment:
                self._send()
            if self._collected is None:
                self._complete_write(segment)
                self._forget_read(segment)
                self._collected = _Collected(segment, self._idle_buffer())
            collected = self._collected
            stop = start + values.numel()
            self._view(segment, collected.buffer)[start:stop].copy_(values)
            collected.spans = collected.spans.union(Intervals([(start, stop)]))
            if collected.spans.covers(0, self._numel[segment]):
                self._send()

    def _new(self, memory: HostMemory) -> _Buffer:
        return _Buffer(memory.buffer(self._largest))

    def _view(self, segment: int, buffer: _Buffer) -> Tensor:
        dtype = self._dtype[segment]
        return buffer.memory[: self._numel[segment] * dtype.itemsize].view(dtype)

    def _is_changing(self, segment: int) -> bool:
        if self._collected is not None and self._collected.segment == segment:
            return True
        return segment in self._written and not self._written[segment].is_done

    def _start_read(self, segment: int, buffer: _Buffer) -> None:
        buffer.free()
        transfer = self.blocks.read(self._block[segment], self._view(segment, buffer))
        self._read[segment] = (buffer, transfer)

    def _unused(self, needed: Sequence[int]) -> _Buffer | None:
        """A read buffer that holds nothing, or nothing ``needed``."""
        if self._free:
            return self._free.pop(0)
        if self._num_unmade:
            self._num_unmade -= 1
            return self._new(self._memory)
        for segment, (buffer, transfer) in self._read.items():
            if segment not in needed and transfer.is_done:
                del self._read[segment]
                return buffer
        return None

    def _least_needed(self) -> _Buffer:
        segment = list(self._read)[-1]
        buffer, _ = self._read[segment]
        self._forget_read(segment)
        self._free.remove(buffer)
        return buffer

    def _forget_read(self, segment: int) -> None:
        if segment in self._read:
            buffer, transfer = self._read.pop(segment)
            with suppress(StorageError):  # of stale values
                transfer.wait()
            self._free.append(buffer)

    def _idle_buffer(self) -> _Buffer:
        self._idle[0].free()  # raises if its write failed, and is still there then
        return self._idle.pop(0)

    def _complete_write(self, segment: int) -> None:
        if self._collected is not None and self._collected.segment == segment:
            self._send()
        transfer = self._written.pop(segment, None)
        if transfer is not None:
            transfer.wait()

    def _send(self) -> None:
        """Start to write the collected values, completed by old values in their gaps."""
        collected, self._collected = self._collected, None
        assert collected is not None
        segment, buffer = collected.segment, collected.buffer
        self._idle.append(buffer)
        gaps = collected.spans.complement(self._numel[segment])
        if gaps:
            old = torch.empty(self._numel[segment], dtype=self._dtype[segment], device="cpu")
            self.blocks.read(self._block[segment], old).wait()
            for start, stop in gaps.spans:
                self._view(segment, buffer)[start:stop].copy_(old[start:stop])
        transfer = self.blocks.write(self._block[segment], self._view(segment, buffer))
        buffer.transfer = self._written[segment] = transfer
