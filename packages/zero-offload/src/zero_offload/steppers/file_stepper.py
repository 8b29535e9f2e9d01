"""Master weights and optimizer state in a file on NVMe.

As in ZeRO-Infinity (arXiv 2104.07857, sections 5.1 and 6.3) an update streams the state through a
few host buffers. A chunk of a step has the runs in one block ([Note: blocks] of `stepper`). While a
block is updated, the next ones are read and the last ones written.

[Note: buffers]
A block has several **parts** (master weights, each state). Part ``p`` of block ``i`` is block ``i *
num_parts + p`` of the `BlockFile`, here called **record**, empty if block ``i`` lacks the part.
Blocks are **announced** in the order in which they will be taken. A buffer has room for all parts
of one block and is free, prefetched, being read, taken or being written. Three buffers are enough
to read, update and write at the same time.

[Note: prefetch]
Steps usually take the same blocks in the same order. While nothing is announced, free buffers are
filled with the blocks that followed in the last step. Announced blocks may reuse these buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from zero_offload.flat.geometry import Geometry, Run
from zero_offload.memory.storage import BlockFile, Transfer, aligned_empty
from zero_offload.protocols import Groups
from zero_offload.rules.rule import MASTER, Rule
from zero_offload.steppers.stepper import Block, BlockLayout, Chunk, RuleStepper, StateBytes


@dataclass(slots=True)
class _Buffer:
    """Aligned memory for each part of a block, and the pending transfers."""

    parts: list[Tensor]
    transfers: list[Transfer] = field(default_factory=list)

    def wait(self) -> None:
        for transfer in self.transfers:
            transfer.wait()
        self.transfers.clear()

    def settle(self) -> None:
        while self.transfers:
            self.transfers.pop().settle()


def longest_parts(sizes: Sequence[int], num_parts: int) -> list[int]:
    """Return the maximum bytes of each part. ``sizes`` has the parts of block 0, block 1, ..."""
    return [max(sizes[part::num_parts], default=0) for part in range(num_parts)]


class BlockPipeline:
    """Pipeline of blocks between a file and buffers, with reads ahead and writes behind.

    `announce` may be called from any thread, all other methods from one thread at a time. A
    failed write raises StorageError in a later call. See [Note: buffers].
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
        self.prefetched: dict[int, _Buffer] = {}
        self._followers: dict[int, int] = {}  # next announced block of each block
        self._last: int | None = None  # last block announced with all parts
        self._reading: dict[int, _Buffer] = {}
        self._held: dict[int, _Buffer] = {}
        self._writing: dict[int, _Buffer] = {}

    @property
    def is_idle(self) -> bool:
        return not self._ahead and not self._reading

    def announce(self, blocks: Iterable[int], parts: Iterable[int] | None = None) -> None:
        """Announce the blocks that will be taken next, in this order.

        ``parts`` of each are read, by default all. A block may be announced again before it is
        taken.
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

        Each part is uint8, of its record's length, and undefined if it was not read. The caller may
        use the memory until `put`.
        """
        self._read_ahead()
        # No buffer is free, or the block is still being written: wait for the oldest write.
        while block not in self._reading:
            assert self._ahead[0][0] == block, "blocks are taken in the order of announcement"
            self._retire(next(iter(self._writing)))
            self._read_ahead()
        buffer = self._reading[block]
        buffer.wait()
        self._held[block] = self._reading.pop(block)
        return [memory[: self._size(block, p)] for p, memory in enumerate(buffer.parts)]

    def put(self, block: int, parts: Iterable[int] | None = None) -> None:
        """Start to write a block's ``parts``, by default all. Its buffer is free when that ends."""
        buffer = self._held.pop(block)
        self._writing[block] = buffer
        for p in range(self._num_parts) if parts is None else parts:
            if size := self._size(block, p):
                record = block * self._num_parts + p
                buffer.transfers.append(self._file.write(record, buffer.parts[p][:size]))
        self._read_ahead()

    def flush(self) -> None:
        while self._writing:
            self._retire(next(iter(self._writing)))

    def prefetch(self) -> None:
        """Start to read the blocks that are expected next. See [Note: prefetch]."""
        self._read_ahead()
        first = block = None if self._last is None else self._followers.get(self._last)
        while block is not None and not self._ahead and (self._free or block in self.prefetched):
            if block in self._reading or block in self._held or block in self._writing:
                return
            if block not in self.prefetched:
                self.prefetched[block] = self._start_read(block, range(self._num_parts))
            block = self._followers.get(block)
            if block == first:
                return

    def abandon(self) -> None:
        """Drop the announced blocks after an error, and wait for all transfers, failed or not."""
        self._ahead.clear()
        for place in (self.prefetched, self._reading, self._held, self._writing):
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
        """Start to read announced blocks while there are buffers. Do not wait for writes."""
        for block, buffer in list(self._writing.items()):
            if all(transfer.is_done for transfer in buffer.transfers):
                self._retire(block)
        while self._ahead:
            block, parts = self._ahead[0]
            if block in self._reading or block in self._held or block in self._writing:
                return  # The block's earlier announcement is still in progress.
            if block in self.prefetched:
                self._ahead.popleft()
                self._reading[block] = self.prefetched.pop(block)
            elif self._free or self.prefetched:
                self._ahead.popleft()
                self._reading[block] = self._start_read(block, parts)
            else:
                return

    def _start_read(self, block: int, parts: Iterable[int]) -> _Buffer:
        if not self._free:
            _, reused = self.prefetched.popitem()  # drops the block that is needed last
            reused.settle()
            self._free.append(reused)
        buffer = self._free.pop()
        for p in parts:
            if size := self._size(block, p):
                record = block * self._num_parts + p
                buffer.transfers.append(self._file.read(record, buffer.parts[p][:size]))
        return buffer


BLOCK_NUMEL = 1 << 20
"""Maximum elements of a block: in fp32 4 MiB per part, and 12 MiB per buffer for Adam."""


class FileStepper(RuleStepper):
    """`RuleStepper` with its blocks in a file, and host buffers for at most ``buffer_count``."""

    file: BlockFile
    is_in_place = False
    is_sequential = True  # blocks are read in the order of `plan`

    def __init__(
        self,
        geometry: Geometry,
        rule: Rule,
        groups: Groups,
        *,
        folder: str | Path,
        buffer_count: int,
    ) -> None:
        rules = [rule.for_params(tensor.dtype) for _, tensor in geometry.shards]
        layout = BlockLayout(geometry, rules, BLOCK_NUMEL)
        super().__init__(geometry, rule, layout, groups)
        self.file = BlockFile(folder, layout.record_bytes, name="optimizer-state")
        self._pipeline = BlockPipeline(self.file, len(layout.names), buffer_count)
        with torch.no_grad():
            for start, shard in geometry.shards:
                if not shard.is_meta:  # a shard on the meta device has no values
                    self.write(MASTER, start, shard)
        self.fill(range(len(geometry.pieces)), is_fresh=True)

    def num_bytes(self) -> StateBytes:
        """Return the bytes of the buffers, because the file takes no host memory."""
        return StateBytes(0, 0, self._pipeline.buffer_bytes)

    def chunks(self, runs: Sequence[Run]) -> list[Chunk]:
        work: dict[int, list[Run]] = {}
        for run in runs:
            for index, a, b in self.layout.overlaps(run.start, run.stop):
                work.setdefault(index, []).append(Run(a, b, run.pieces, run.key))
        self._pipeline.announce(work)
        return [Chunk(tuple(found)) for found in work.values()]

    def take(self, index: int) -> dict[str, Tensor]:
        kept = self.layout.blocks[index].kept
        named = zip(self.layout.names, self._pipeline.take(index), strict=True)
        return {name: part.view(kept[name][0]) for name, part in named if name in kept}

    def put(self, index: int) -> None:
        self._pipeline.put(index)

    def settle(self) -> None:
        """Complete all writes, and start to prefetch, unless a further step is announced."""
        if self._pipeline.is_idle:
            self._pipeline.flush()
            self._pipeline.prefetch()

    def read(self, name: str, start: int, stop: int) -> Tensor:
        found = torch.zeros(stop - start, dtype=torch.float32, device="cpu")
        spans = list(self.layout.overlaps(start, stop))
        with self._pass(name, spans, is_read=True) as blocks:
            for index, a, b, block, stored in blocks:
                found[a - start : b - start] = block.decode(stored, name, a, b)
                self._pipeline.put(index, ())
        return found

    def peek(self, name: str, start: int, stop: int) -> Tensor:
        """Read the file directly, because the pipeline belongs to the update thread."""
        found = torch.zeros(stop - start, dtype=torch.float32, device="cpu")
        for index, a, b in self.layout.overlaps(start, stop):
            block, stored = self.layout.blocks[index], {}
            for part in self.layout.parts_of(index, name):
                own = self.layout.names[part]
                record = index * len(self.layout.names) + part
                memory = aligned_empty(self.file.block_bytes[record])
                self.file.read_block(record, memory)
                stored[own] = memory.view(block.kept[own][0])
            found[a - start : b - start] = block.decode(stored, name, a, b)
        return found

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Overwrite a range. Buffers that are replaced entirely are not read first."""
        spans = list(self.layout.overlaps(start, start + values.numel()))
        for is_read in (False, True):
            some = [span for span in spans if self._is_replaced(name, *span) != is_read]
            with self._pass(name, some, is_read=is_read) as blocks:
                for index, a, b, block, stored in blocks:
                    block.encode(stored, name, a, values[a - start : b - start])
                    self._pipeline.put(index, self.layout.parts_of(index, name))

    @contextmanager
    def _pass(
        self, name: str, spans: Sequence[tuple[int, int, int]], *, is_read: bool
    ) -> Iterator[Iterator[tuple[int, int, int, Block, dict[str, Tensor]]]]:
        """Take the block of each span in turn.

        The context's iterator yields ``(index, a, b, block, buffers)``. If ``is_read``, the buffers
        have been read from the file. All writes are complete when it exits without an error.
        """
        for index, _, _ in spans:
            self._pipeline.announce([index], self.layout.parts_of(index, name) if is_read else ())
        try:
            yield ((i, a, b, self.layout.blocks[i], self.take(i)) for i, a, b in spans)
            self._pipeline.flush()
        except BaseException:
            self._pipeline.abandon()
            raise

    def _is_replaced(self, name: str, index: int, start: int, stop: int) -> bool:
        """Return whether a write to the range replaces all data of the buffers it changes."""
        block = self.layout.blocks[index]
        is_alone = name == MASTER or block.rule.block == 1
        return is_alone and (start, stop) == (block.start, block.stop)
