"""Entry point ``host`` of ``zero_core.param_tiers``: memory of offloaded parameter shards.

As in ZeRO-Infinity (arXiv 2104.07857), parameter shards are copied to the device when a unit needs
them. With NVMe, the first shards in order of use, up to ``max_in_cpu`` elements, are in host memory
and the others in a file. Otherwise all are in host memory.

[Note: buffers of the file]
read buffers   hold shards that are read ahead, and fetched shards. A fetched shard keeps its
               buffer, because backward and the next micro-batch fetch the latest shards again. A
               read evicts the least recently fetched shard that is not expected sooner.
write buffers  collect new values, which arrive in ascending order. One of the two buffers is filled
               while the other is written to the file. An update skips padding and inactive
               parameters. The skipped values are kept in memory if they are few. Otherwise the
               shard is read before it is written.

[Note: threads]
The compute thread calls `FileShards.expect` and `FileShards.fetch`, the update thread
`FileShards.write`. One lock orders the calls. A shard has at most one pending operation: read,
collection or write. New values discard a read-ahead of their shard and make a fetched copy stale. A
stale copy keeps its position in the order of fetches and is read again.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from zero_offload.errors import StorageError
from zero_offload.flat.geometry import Intervals
from zero_offload.memory.host_memory import HostMemory
from zero_offload.memory.storage import BlockFile, Transfer
from zero_offload.memory.streams import Copy, start_copy

_BLOCK = "offload_param"
NUM_WRITE_BUFFERS = 2
_MAX_KEPT = 4096
"""Maximum elements of a shard's gaps that are kept in memory. See [Note: buffers of the file]."""

Shards = Sequence[tuple[int, int, torch.dtype]]


@dataclass(frozen=True, slots=True)
class ParamSettings:
    """Settings of block ``offload_param``. ``max_in_cpu`` and ``buffer_size`` count elements."""

    nvme_path: str | None = None
    max_in_cpu: int = 1_000_000_000
    buffer_count: int = 5
    buffer_size: int = 100_000_000
    pin_memory: bool = True

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ParamSettings:
        """Read the block from a resolved ``zero_optimization`` config, or raise ValueError."""
        block = {k: v for k, v in (config.get(_BLOCK) or {}).items() if v is not None}
        device = block.pop("device", "cpu")
        unknown = sorted(set(block) - set(cls.__dataclass_fields__))
        if unknown:
            raise ValueError(f"{_BLOCK}.{unknown[0]} is not served by zero-offload")
        if device not in ("none", "cpu", "nvme"):
            raise ValueError(f'{_BLOCK}.device = {device!r} is not served: use "cpu" or "nvme"')
        if device == "nvme" and "nvme_path" not in block:
            raise ValueError(f'{_BLOCK}.device = "nvme" needs {_BLOCK}.nvme_path, a folder')
        for key in ("max_in_cpu", "buffer_count", "buffer_size"):
            least = 0 if key == "max_in_cpu" else 1
            if key in block and (isinstance(block[key], bool) or block[key] < least):
                raise ValueError(f"{_BLOCK}.{key} must be at least {least}, got {block[key]!r}")
        if device != "nvme":
            block["nvme_path"] = None
        return cls(**block)


def create_param_tier(
    *, shards: Shards, device: torch.device, config: Mapping[str, Any]
) -> OffloadedParams:
    """Create the memory for offloaded parameter shards.

    Args:
        shards: ``(segment, numel, dtype)`` of each shard, in order of use.
        config: the resolved ``zero_optimization`` block.

    Raises:
        ValueError: a setting is not supported, or ``nvme_path`` is no writable folder.
        StorageError: the disk is full.
    """
    settings = ParamSettings.from_config(config)
    num_host = num_in_host_memory(shards, settings)
    should_pin = settings.pin_memory and device.type != "cpu"
    memory = HostMemory(should_pin=should_pin)
    tensors = memory.tensors([(numel, dtype) for _, numel, dtype in shards[:num_host]])
    host = {segment: t for (segment, _, _), t in zip(shards, tensors, strict=False)}
    file = None
    if num_host < len(shards):
        assert settings.nvme_path is not None, "without a file all are in host memory"
        file = FileShards(
            shards[num_host:],
            settings.nvme_path,
            num_buffers=settings.buffer_count,
            pin_memory=should_pin,
        )
    return OffloadedParams(host, file)


def num_in_host_memory(shards: Shards, settings: ParamSettings) -> int:
    if settings.nvme_path is None:
        return len(shards)
    totals = accumulate(numel for _, numel, _ in shards)
    count = sum(total <= settings.max_in_cpu for total in totals)
    largest = max((numel for _, numel, _ in shards[count:]), default=0)
    if largest > settings.buffer_size:
        raise ValueError(
            f"{_BLOCK}.buffer_size = {settings.buffer_size} elements, but the largest shard that "
            f"is kept in the file has {largest}: raise it to that"
        )
    return count


class OffloadedParams:
    """Offloaded parameter shards, in host memory (``host``, by segment) or in ``file``."""

    def __init__(self, host: Mapping[int, Tensor], file: FileShards | None) -> None:
        self.bytes_fetched = 0
        self.file = file
        self._host = host

    def expect(self, segments: Sequence[int]) -> None:
        """Announce the next segments to be fetched. Their shards in the file are read ahead."""
        if self.file is not None:
            self.file.expect([s for s in segments if s not in self._host])

    def fetch(self, segment: int, out: Tensor) -> Copy:
        """Start to copy a shard to ``out`` (1-D, same length and dtype) on the current stream.

        Raises:
            StorageError: the shard could not be read from the file, or an earlier write failed.
        """
        self.bytes_fetched += out.numel() * out.element_size()
        if segment in self._host:
            return start_copy(out, self._host[segment])
        assert self.file is not None, "a segment that the tier was not made for"
        return self.file.fetch(segment, out)

    def write(self, segment: int, start: int, values: Tensor) -> None:
        """Overwrite a shard from element ``start`` on. ``values`` may be reused after the call."""
        if segment in self._host:
            self._host[segment][start : start + values.numel()].copy_(values)
        else:
            assert self.file is not None, "a segment that the tier was not made for"
            self.file.write(segment, start, values)

    def home(self, segment: int) -> Tensor | None:
        """Return the shard's host memory, or None if the shard is in the file."""
        return self._host.get(segment)

    def file_traffic(self) -> tuple[int, int]:
        """Wait for pending transfers. Return the bytes read from and written to the file."""
        return (0, 0) if self.file is None else self.file.blocks.traffic()

    def report(self) -> Mapping[str, int]:
        found = {"host parameters": sum(t.nbytes for t in self._host.values())}
        if self.file is not None:
            found["host buffers of parameters"] = self.file.num_buffer_bytes
            found["file parameters"] = self.file.blocks.num_bytes
        return found


@dataclass(slots=True, eq=False)
class _Buffer:
    """Host memory (uint8) with its last copy to the device and last write to the file."""

    memory: Tensor
    copy: Copy | None = None
    transfer: Transfer | None = None

    def free(self) -> Tensor:
        copy, self.copy = self.copy, None
        transfer, self.transfer = self.transfer, None
        if copy is not None:
            copy.block()
        if transfer is not None:
            transfer.wait()
        return self.memory


@dataclass(slots=True)
class _Collected:
    """New values of one shard that were written so far, before they go to the file."""

    segment: int
    buffer: _Buffer
    spans: Intervals = field(default_factory=Intervals)


_Kept = tuple[Intervals, list[Tensor]]
"""Gaps that the last update of a shard did not write, and their values."""
_NOTHING_KEPT: _Kept = Intervals(), []


class FileShards:
    """Parameter shards in a `BlockFile`, one per block. See [Note: buffers of the file]."""

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
        self._shards = {segment: (numel, dtype) for segment, numel, dtype in shards}
        self._memory = HostMemory(should_pin=pin_memory)
        self._pageable = HostMemory(should_pin=False)
        self.blocks = BlockFile(folder, sizes, name="parameters")
        self._lock = threading.Lock()
        self._largest = max(sizes)
        self._num_unmade = min(num_buffers, len(shards))
        self._free: list[_Buffer] = []
        # shards read ahead and not fetched yet
        self.read_ahead: dict[int, tuple[_Buffer, Transfer]] = {}
        self._fetched: dict[int, _Buffer] = {}  # fetched shards, most recent last
        self._stale: set[int] = set()  # shards written since they were last read
        self._collected: _Collected | None = None
        self._idle = [
            _Buffer(self._pageable.buffer(self._largest)) for _ in range(NUM_WRITE_BUFFERS)
        ]
        self._written: dict[int, Transfer] = {}  # writes that nobody has waited for
        self._kept: dict[int, _Kept] = {}

    @property
    def num_buffer_bytes(self) -> int:
        return self._memory.num_bytes + self._pageable.num_bytes

    def block_of(self, segment: int) -> int:
        return self._block[segment]

    def expect(self, segments: Sequence[int]) -> None:
        """Start to read shards in order, up to one with a pending write or without a buffer."""
        with self._lock:
            sooner: set[int] = set()
            for segment in segments:
                sooner.add(segment)
                if segment in self.read_ahead or self._is_kept(segment):
                    continue
                collected, written = self._collected, self._written.get(segment)
                if collected is not None and collected.segment == segment:
                    return
                if written is not None and not written.is_done:
                    return
                for dropped in [read for read in self.read_ahead if read not in segments]:
                    self._forget_read(dropped)
                buffer = self._buffer_for(segment, sooner)
                if buffer is None:
                    return
                self._start_read(segment, buffer)

    def fetch(self, segment: int, out: Tensor) -> Copy:
        """Wait for the shard's read and enqueue its copy to ``out`` on the current stream."""
        with self._lock:
            self._complete_write(segment)
            transfer = None
            if self._is_kept(segment):
                buffer = self._fetched.pop(segment)
            else:
                if segment not in self.read_ahead:
                    free = self._buffer_for(segment)
                    # Every buffer holds a shard that was read ahead: evict the last of them.
                    if free is None:
                        self._forget_read(list(self.read_ahead)[-1])
                        free = self._free.pop()
                    self._start_read(segment, free)
                buffer, transfer = self.read_ahead.pop(segment)
        is_whole = False
        try:
            if transfer is not None:
                transfer.wait()  # no lock: the update thread may continue
            is_on_device = out.device.type != "cpu"
            if is_on_device and buffer.copy is not None:
                buffer.copy.wait()
            copy = start_copy(out, self._view(segment, buffer))
            if is_on_device:  # a copy on a CPU is already complete
                buffer.copy = copy
            is_whole = True
        finally:
            with self._lock:
                if is_whole and segment not in self._fetched:
                    self._fetched[segment] = buffer
                else:
                    if transfer is not None:
                        transfer.settle()
                    self._free.append(buffer)
        return copy

    def write(self, segment: int, start: int, values: Tensor) -> None:
        """Collect new values of a shard. Write when it has no gaps, or `_kept` has their values."""
        with self._lock:
            if self._collected is not None and self._collected.segment != segment:
                self._send()
            if self._collected is None:
                self._complete_write(segment)
                self._forget_read(segment)
                self._stale.add(segment)
                # If the buffer's last write failed, free() raises and the buffer stays in the list.
                self._idle[0].free()
                self._collected = _Collected(segment, self._idle.pop(0))
            collected = self._collected
            stop = start + values.numel()
            self._view(segment, collected.buffer)[start:stop].copy_(values)
            collected.spans = collected.spans.union(Intervals([(start, stop)]))
            gaps = collected.spans.complement(self._shards[segment][0])
            if not gaps or self._kept.get(segment, _NOTHING_KEPT)[0] == gaps:
                self._send()

    def _view(self, segment: int, buffer: _Buffer) -> Tensor:
        numel, dtype = self._shards[segment]
        return buffer.memory[: numel * dtype.itemsize].view(dtype)

    def _start_read(self, segment: int, buffer: _Buffer) -> None:
        buffer.free()
        transfer = self.blocks.read(self._block[segment], self._view(segment, buffer))
        self.read_ahead[segment] = (buffer, transfer)
        self._stale.discard(segment)

    def _is_kept(self, segment: int) -> bool:
        return segment in self._fetched and segment not in self._stale

    def _buffer_for(self, segment: int, sooner: Collection[int] = ()) -> _Buffer | None:
        """Return a buffer for the shard, or None if all hold shards read ahead or in ``sooner``."""
        if segment in self._fetched:
            return self._fetched.pop(segment)
        if self._free:
            return self._free.pop(0)
        if self._num_unmade:
            self._num_unmade -= 1
            return _Buffer(self._memory.buffer(self._largest))
        for fetched in self._fetched:
            if fetched not in sooner:
                return self._fetched.pop(fetched)
        return None

    def _forget_read(self, segment: int) -> None:
        if segment in self.read_ahead:
            buffer, transfer = self.read_ahead.pop(segment)
            with suppress(StorageError):
                transfer.wait()
            self._free.append(buffer)

    def _complete_write(self, segment: int) -> None:
        if self._collected is not None and self._collected.segment == segment:
            self._send()
        transfer = self._written.pop(segment, None)
        if transfer is not None:
            transfer.wait()

    def _send(self) -> None:
        """Fill the gaps in the collected values with old values, and start to write the shard."""
        collected, self._collected = self._collected, None
        assert collected is not None
        segment, buffer = collected.segment, collected.buffer
        self._idle.append(buffer)
        gaps = collected.spans.complement(self._shards[segment][0])
        if gaps:
            self._fill(segment, gaps, self._view(segment, buffer))
        else:
            self._kept.pop(segment, None)
        transfer = self.blocks.write(self._block[segment], self._view(segment, buffer))
        buffer.transfer = self._written[segment] = transfer

    def _fill(self, segment: int, gaps: Intervals, values: Tensor) -> None:
        kept_gaps, kept = self._kept.pop(segment, _NOTHING_KEPT)
        if kept_gaps == gaps:
            for (start, stop), old in zip(gaps.spans, kept, strict=True):
                values[start:stop].copy_(old)
        else:
            whole = torch.empty_like(values)
            self.blocks.read(self._block[segment], whole).wait()
            for start, stop in gaps.spans:
                values[start:stop].copy_(whole[start:stop])
        if sum(stop - start for start, stop in gaps.spans) <= _MAX_KEPT:
            self._kept[segment] = gaps, [values[a:b].clone() for a, b in gaps.spans]
