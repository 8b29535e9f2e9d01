"""Pipeline of blocks between a file and a few buffers: read ahead, updated, written behind.

ZeRO-Infinity (arXiv 2104.07857, section 6.3, overlap-centric design) reads the optimizer state of
the next parameters and writes that of the last ones while one part is updated.

[Note: buffers]
A block has several **parts** (master weights, each state), which are records of a `BlockFile`.
Part ``p`` of block ``i`` is its record ``i * num_parts + p``, empty if the block has no such part.
Blocks are **announced** in the order in which they will be taken. A buffer has room for all parts
of one block and is in one of five states: free, prefetched, being read, taken, being written. So
memory is bounded by the number of buffers, and three of them are enough for reading, updating and
writing at the same time.

[Note: prefetch]
Steps take the same blocks in the same order. While nothing is announced, free buffers are filled
with the blocks that followed last time, so that a step finds its first blocks in memory. If another
block is announced, such a buffer is reused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from zero_offload.memory.direct_io import aligned_empty
from zero_offload.memory.storage import BlockFile, Transfer


@dataclass(slots=True)
class _Buffer:
    """Aligned memory for each part, and the transfers under way."""

    parts: list[Tensor]
    transfers: list[Transfer] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return all(transfer.is_done for transfer in self.transfers)

    def wait(self) -> None:
        for transfer in self.transfers:
            transfer.wait()
        self.transfers.clear()

    def settle(self) -> None:
        while self.transfers:
            self.transfers.pop().settle()


def longest_parts(sizes: Sequence[int], num_parts: int) -> list[int]:
    """Return the bytes of the longest of each part, from those of each block's parts in turn."""
    return [max(sizes[part::num_parts], default=0) for part in range(num_parts)]


class BlockPipeline:
    """Transfers blocks from a file to buffers and back, with reads ahead and writes behind.

    `announce` may be called from any thread, all else from one at a time. An earlier block that
    could not be written raises StorageError in a later call. See [Note: buffers].
    """

    def __init__(self, file: BlockFile, num_parts: int, buffer_count: int) -> None:
        self._file = file
        self._num_parts = num_parts
        sizes = file.block_bytes
        self._longest = longest_parts(sizes, num_parts)
        num_blocks = len(sizes) // max(num_parts, 1)
        self._free = [
            _Buffer([aligned_empty(num_bytes) for num_bytes in self._longest])
            for _ in range(min(buffer_count, num_blocks))
        ]
        self.buffer_bytes = len(self._free) * sum(self._longest)
        self._ahead: deque[tuple[int, tuple[int, ...]]] = deque()
        self._prefetched: dict[int, _Buffer] = {}
        self._followers: dict[int, int] = {}  # of each block, the next one last time
        self._last: int | None = None  # announced
        self._reading: dict[int, _Buffer] = {}
        self._held: dict[int, _Buffer] = {}
        self._writing: dict[int, _Buffer] = {}

    @property
    def prefetched(self) -> list[int]:
        """Blocks read before they are announced, in order."""
        return list(self._prefetched)

    @property
    def is_idle(self) -> bool:
        """Whether every announced block was taken."""
        return not self._ahead and not self._reading

    def announce(self, blocks: Iterable[int], parts: Iterable[int] | None = None) -> None:
        """Announce the blocks that will be taken next, in this order.

        Of each, ``parts`` are read, or all without ``parts``. A block may be announced again before
        it was taken.
        """
        blocks = list(blocks)
        if parts is None:
            for block in blocks:
                if self._last is not None:
                    self._followers[self._last] = block
                self._last = block
        wanted = tuple(range(self._num_parts) if parts is None else parts)
        self._ahead.extend((block, wanted) for block in blocks)

    def take(self, block: int) -> list[Tensor]:
        """Wait for the announced block and return the memory of its parts.

        Each is uint8, of the record's length, undefined where it was not read. It is the caller's
        until `put` or `drop`.
        """
        self._read_ahead()
        while block not in self._reading:  # its memory, or the block itself, is being written
            assert self._ahead[0][0] == block, "blocks are taken in the order of announcement"
            self._retire(next(iter(self._writing)))
            self._read_ahead()
        buffer = self._reading[block]
        buffer.wait()
        self._held[block] = self._reading.pop(block)
        return [memory[: self._size(block, p)] for p, memory in enumerate(buffer.parts)]

    def put(self, block: int, parts: Iterable[int] | None = None) -> None:
        """Start to write ``parts`` of a taken block, or all."""
        buffer = self._held.pop(block)
        self._writing[block] = buffer
        for p in range(self._num_parts) if parts is None else parts:
            if size := self._size(block, p):
                record = block * self._num_parts + p
                buffer.transfers.append(self._file.write(record, buffer.parts[p][:size]))
        self._read_ahead()

    def drop(self, block: int) -> None:
        self._free.append(self._held.pop(block))
        self._read_ahead()

    def flush(self) -> None:
        """Wait until everything that was put is in the file."""
        while self._writing:
            self._retire(next(iter(self._writing)))

    def prefetch(self) -> None:
        """Start to read the blocks that followed last time, unless others are announced.

        See [Note: prefetch]. Writes to the file past this object are not seen from then on.
        """
        self._read_ahead()
        first = block = None if self._last is None else self._followers.get(self._last)
        while block is not None and not self._ahead and (self._free or block in self._prefetched):
            if block in self._reading or block in self._held or block in self._writing:
                return
            if block not in self._prefetched:
                self._prefetched[block] = self._start_read(block, range(self._num_parts))
            block = self._followers.get(block)
            if block == first:
                return

    def abandon(self) -> None:
        """Drop the announced blocks and wait for all transfers, failed or not, after an error."""
        self._ahead.clear()
        for place in (self._prefetched, self._reading, self._held, self._writing):
            for buffer in place.values():
                buffer.settle()
                self._free.append(buffer)
            place.clear()

    def _size(self, block: int, part: int) -> int:
        return self._file.block_bytes[block * self._num_parts + part]

    def _retire(self, block: int) -> None:
        self._writing[block].wait()
        self._free.append(self._writing.pop(block))

    def _read_ahead(self) -> None:
        """Start to read announced blocks while there is memory, without waiting for anything."""
        for block in [b for b, buffer in self._writing.items() if buffer.is_done]:
            self._retire(block)
        while self._ahead:
            block, parts = self._ahead[0]
            if block in self._reading or block in self._held or block in self._writing:
                return  # announced twice: what was put must be in the file first
            if block in self._prefetched:
                self._ahead.popleft()
                self._reading[block] = self._prefetched.pop(block)
            elif self._free or self._prefetched:
                self._ahead.popleft()
                self._reading[block] = self._start_read(block, parts)
            else:
                return

    def _start_read(self, block: int, parts: Iterable[int]) -> _Buffer:
        if not self._free:
            _, reused = self._prefetched.popitem()  # the last in order
            reused.settle()
            self._free.append(reused)
        buffer = self._free.pop()
        for p in parts:
            if size := self._size(block, p):
                record = block * self._num_parts + p
                buffer.transfers.append(self._file.read(record, buffer.parts[p][:size]))
        return buffer
