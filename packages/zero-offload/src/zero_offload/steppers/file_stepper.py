"""Master weights and optimizer state in a file on NVMe.

ZeRO-Infinity (arXiv 2104.07857, sections 5.1 and 6.3): optimizer state that the host has no room
for lies on NVMe, and an update streams it through a few buffers of host memory. Gradients and
parameters are transferred as for the host tier.

One chunk of a step is one block of the file. It is read, updated in host memory where active pieces
lie in it, and written back, while the next blocks are read and the last ones written (see
`zero_offload.memory.block_pipeline`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from zero_offload.flat.geometry import Geometry, Run
from zero_offload.memory.block_pipeline import BlockPipeline
from zero_offload.memory.direct_io import aligned_empty
from zero_offload.memory.storage import BlockFile
from zero_offload.protocols import Groups
from zero_offload.rules.rule import MASTER, Rule
from zero_offload.steppers.stepper import Block, BlockLayout, Chunk, RuleStepper, StateBytes

BLOCK_NUMEL = 1 << 20
"""Elements of a block: requests of 4 MiB, and for Adam 12 MiB of host memory per buffer."""


class FileStepper(RuleStepper):
    """`RuleStepper` over blocks of a file in ``folder``, of fp32, bf16 or fp16 shards.

    ``buffer_count`` blocks are in host memory at once. 3 or more read, update and write together.
    """

    file: BlockFile
    is_in_place = False
    is_sequential = True  # blocks are read ahead in the order of planning

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
                if not shard.is_meta:  # the values of an offloaded shard come with the first write
                    self.write(MASTER, start, shard)
        self.fill_fresh()

    def num_bytes(self) -> StateBytes:
        """Return the buffers that blocks pass through, all that the state takes of the host."""
        return StateBytes(0, 0, self._pipeline.buffer_bytes)

    def chunks(self, runs: Sequence[Run]) -> list[Chunk]:
        """One chunk per block that has active pieces. The blocks are announced to the pipeline."""
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
        """Unless a further step waits, complete the writes and read ahead for the next step."""
        if self._pipeline.is_idle:
            self._pipeline.flush()
            self._pipeline.prefetch()

    def read(self, name: str, start: int, stop: int) -> Tensor:
        found = torch.zeros(stop - start, dtype=torch.float32, device="cpu")
        spans = list(self.layout.overlaps(start, stop))
        with self._pass(name, spans, is_read=True) as blocks:
            for index, a, b, block, stored in blocks:
                found[a - start : b - start] = block.decode(stored, name, a, b)
                self._pipeline.drop(index)
        return found

    def peek(self, name: str, start: int, stop: int) -> Tensor:
        """Read past the pipeline, whose buffers belong to the thread that updates."""
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
        """Overwrite the blocks of a range. Those that it replaces entirely are not read first."""
        spans = list(self.layout.overlaps(start, start + values.numel()))
        replaced = [span for span in spans if self._is_replaced(name, *span)]
        changed = [span for span in spans if not self._is_replaced(name, *span)]
        for some, is_read in ((replaced, False), (changed, True)):
            with self._pass(name, some, is_read=is_read) as blocks:
                for index, a, b, block, stored in blocks:
                    block.encode(stored, name, a, values[a - start : b - start])
                    self._pipeline.put(index, self.layout.parts_of(index, name))

    @contextmanager
    def _pass(
        self, name: str, spans: Sequence[tuple[int, int, int]], *, is_read: bool
    ) -> Iterator[Iterator[tuple[int, int, int, Block, dict[str, Tensor]]]]:
        """``(index, a, b, block, buffers)`` for each span, one after another.

        The buffers of the state are read before if ``is_read``, and everything that was put is in
        the file after.
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
        """Whether a write to the range leaves nothing of the buffers that it is written to."""
        block = self.layout.blocks[index]
        is_alone = name == MASTER or block.rule.block == 1
        return is_alone and (start, stop) == (block.start, block.stop)
