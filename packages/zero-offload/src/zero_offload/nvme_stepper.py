"""Master weights and optimizer state in a file on NVMe, updated block by block.

ZeRO-Infinity (arXiv 2104.07857, sections 5.1 and 6.3): what the host cannot hold lies on NVMe, and
an update streams it through a few buffers of host memory. Gradients and parameters take the way
that they take for the host tier; only the state is elsewhere.

One chunk of a step is one block of the file (see `block_layout`): read, updated in host memory
where active pieces lie in it, written back, while the next blocks are read and the last ones
written (see `block_pipeline`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_offload.block_layout import Block, BlockLayout
from zero_offload.block_pipeline import BlockPipeline
from zero_offload.geometry import Geometry, Run, plan_runs
from zero_offload.grads import GradLedger
from zero_offload.kernel_stepper import KERNEL_DTYPES, joined_grad
from zero_offload.rule_stepper import RuleStepper
from zero_offload.stepper import MASTER, Chunk
from zero_offload.storage import BlockFile
from zero_offload.update_rule import Rule

__all__ = ["BLOCK_NUMEL", "NvmeStepper"]

BLOCK_NUMEL = 1 << 20
"""Elements of a block: requests of 4 MiB, and for Adam 12 MiB of host memory per buffer."""


class NvmeStepper(RuleStepper):
    """An update rule over master weights and state in a file.

    Args:
        geometry: the flat space; shards of fp32, bf16 or fp16.
        rule: the update, before its ``for_params``.
        groups: the ``param_groups``: what states hold at first.
        folder: on the NVMe disk; see `BlockFile`.
        buffer_count: blocks in host memory at once; 3 or more read, update and write together.
        block_numel: most elements of a block.

    Attributes:
        file: the `BlockFile`, with the counters of bytes and seconds.

    Raises:
        ValueError: the folder or a shard's dtype cannot be served.
        StorageError: the disk has not the room.
    """

    def __init__(
        self,
        geometry: Geometry,
        rule: Rule,
        groups: Sequence[Mapping[str, Any]],
        *,
        folder: str | Path,
        buffer_count: int,
        block_numel: int = BLOCK_NUMEL,
    ) -> None:
        _check_served(geometry)
        shards = range(len(geometry.shards))
        super().__init__(geometry, rule, groups, is_in_place=False, split=shards)
        self._layout = BlockLayout(geometry, rule, block_numel)
        self.file: BlockFile = BlockFile(folder, self._layout.record_bytes, name="optimizer-state")
        self._pipeline = BlockPipeline(self.file, len(self._layout.names), buffer_count)
        self._fill_file()

    @property
    def state_bytes(self) -> int:
        """Bytes of host memory that blocks pass through: all that there is of the state in it."""
        return self._pipeline.buffer_bytes

    def _fill_file(self) -> None:
        """Master weights from the shards; states that start at zero need no write."""
        with torch.no_grad():
            for start, shard in self.geometry.shards:
                if not shard.is_meta:  # what rests elsewhere comes with the first write
                    self.write_master(start, shard)
            for index in range(len(self.geometry.pieces)):
                self._fill(index, is_fresh=True)

    def _take(self, index: int) -> tuple[Block, dict[str, Tensor]]:
        """A block and its buffers, once they are read."""
        return self._layout.blocks[index], self._layout.views(index, self._pipeline.take(index))

    @contextmanager
    def _pass(
        self, name: str, spans: Sequence[tuple[int, int, int]], *, is_read: bool
    ) -> Iterator[Iterator[tuple[int, int, int, Block, dict[str, Tensor]]]]:
        """``(index, a, b, block, buffers)`` for each span, one after another.

        What a state is made of is read before, if ``is_read``, and everything that was put is in
        the file after.
        """
        for index, _, _ in spans:
            self._pipeline.announce([index], self._layout.parts_of(index, name) if is_read else ())
        try:
            yield ((index, a, b, *self._take(index)) for index, a, b in spans)
            self._pipeline.flush()
        except BaseException:
            self._pipeline.abandon()
            raise

    def plan(
        self, active: Sequence[int], groups: Sequence[Mapping[str, Any]], grads: GradLedger
    ) -> list[Chunk]:
        """One chunk per block that has active pieces. They are announced to the pipeline."""
        pieces = self.geometry.pieces
        keys = self._settings(active, groups)
        work: dict[int, list[Run]] = {}
        for run in plan_runs(self.geometry, active, keys):
            grads.segments(run.start, run.stop)  # refuses a missing gradient before any update
            for index, a, b in self._layout.overlaps(run.start, run.stop):
                within = (i for i in run.pieces if pieces[i].start < b and a < pieces[i].stop)
                work.setdefault(index, []).append(Run(a, b, tuple(within), run.key))
        self._pipeline.announce(work)
        return [Chunk(tuple(runs), index) for index, runs in work.items()]

    def update(
        self,
        chunk: Chunk,
        grads: GradLedger,
        grad_scale: float,
        out: Callable[[int, int], Tensor],
    ) -> None:
        """Take the block, update its runs, and leave its write to the pipeline."""
        index: int = chunk.settings
        block, memory = self._take(index)
        for run in chunk.runs:
            rounded = out(run.start, run.stop)
            for a, b, grad in _stretches(block, run, grads):
                stretch = _clip(block, memory, a, b)
                block.rule.update(
                    stretch.pop(MASTER, None),
                    grad if grad.dtype in KERNEL_DTYPES else grad.float(),
                    stretch,
                    run.key,
                    grad_scale,
                    rounded[a - run.start : b - run.start],
                )
        self._pipeline.put(index)

    def settle(self) -> None:
        """Unless a further step waits, see to it that this one is in the file, and look ahead."""
        if self._pipeline.is_idle:
            self._pipeline.flush()
            self._pipeline.foresee()

    def master(self, start: int, stop: int) -> Tensor:
        """A copy, read from the file."""
        return self.read(MASTER, start, stop)

    def read_master(self, start: int, stop: int) -> Tensor:
        """A copy, read from the file; zero between shards."""
        return self.read(MASTER, start, stop)

    def write_master(self, start: int, values: Tensor) -> None:
        """Overwrite a range in the file; what lies between shards is not kept."""
        self.write(MASTER, start, values)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """A copy, read from the file; zero outside of blocks."""
        found = torch.zeros(stop - start, dtype=torch.float32, device="cpu")
        spans = list(self._layout.overlaps(start, stop))
        with self._pass(name, spans, is_read=True) as blocks:
            for index, a, b, block, memory in blocks:
                found[a - start : b - start] = _decode(block, memory, name, a, b)
                self._pipeline.drop(index)
        return found

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Overwrite a range in the file; what lies outside of blocks is not kept.

        Blocks covered as a whole are not read first.
        """
        spans = list(self._layout.overlaps(start, start + values.numel()))
        whole = [self._is_replaced(name, *span) for span in spans]
        for is_read in (False, True):
            some = [
                span for span, is_whole in zip(spans, whole, strict=True) if is_whole != is_read
            ]
            with self._pass(name, some, is_read=is_read) as blocks:
                for index, a, b, block, memory in blocks:
                    _encode(block, memory, name, a, values[a - start : b - start])
                    self._pipeline.put(index, self._layout.parts_of(index, name))

    def _is_replaced(self, name: str, index: int, start: int, stop: int) -> bool:
        """Whether a write to the range leaves nothing of the parts that it goes to."""
        block = self._layout.blocks[index]
        is_alone = name == MASTER or block.rule.block == 1
        return is_alone and (start, stop) == (block.start, block.stop)


def _stretches(block: Block, run: Run, grads: GradLedger) -> list[tuple[int, int, Tensor]]:
    """What each call of the rule updates of a run in a block, with its gradient."""
    if block.rule.block == 1:
        return grads.segments(run.start, run.stop)
    return [(run.start, run.stop, joined_grad(grads, run.start, run.stop))]


def _clip(block: Block, memory: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """The buffers of a stretch: of the whole block, unless the rule takes any stretch."""
    if block.rule.block == 1:
        return {n: values[start - block.start : stop - block.start] for n, values in memory.items()}
    assert (start, stop) == (block.start, block.stop), "a block is one stretch"
    return dict(memory)


def _decode(block: Block, memory: Mapping[str, Tensor], name: str, start: int, stop: int) -> Tensor:
    if name in memory and name == MASTER:
        return memory[MASTER][start - block.start : stop - block.start]
    return block.rule.decode(name, memory, start - block.start, stop - block.start)


def _encode(
    block: Block, memory: Mapping[str, Tensor], name: str, start: int, values: Tensor
) -> None:
    if name in memory and name == MASTER:
        memory[MASTER][start - block.start :][: values.numel()].copy_(values)
    else:
        block.rule.encode(name, memory, start - block.start, values.to("cpu"))


def _check_served(geometry: Geometry) -> None:
    unserved = sorted({str(t.dtype) for _, t in geometry.shards if t.dtype not in KERNEL_DTYPES})
    if unserved:
        raise ValueError(
            f'offload_optimizer.device = "nvme" serves parameters of fp32, bf16 and fp16, not of '
            f'{", ".join(unserved)}: use device "cpu"'
        )
