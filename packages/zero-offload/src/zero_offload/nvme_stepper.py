"""Master weights and optimizer state in a file on NVMe, updated block by block.

ZeRO-Infinity (arXiv 2104.07857, sections 5.1 and 6.3): what the host cannot hold lies on NVMe, and
an update streams it through a few buffers of host memory. Gradients and parameters take the way
that they take for the host tier; only the state is elsewhere.

[Note: blocks]
The file holds each shard of the flat space in blocks of at most `BLOCK_NUMEL` elements; no block
crosses a shard. A block's parts are its fp32 master weights and each state of the `Rule`. One chunk
of a step is one block: read, updated in host memory where active pieces lie in it, written back,
while the next ones are read and the last ones written (see `block_pipeline`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_offload.block_pipeline import BlockPipeline
from zero_offload.geometry import Geometry, Run, plan_runs
from zero_offload.grads import GradLedger
from zero_offload.kernel_stepper import KERNEL_DTYPES
from zero_offload.stepper import MASTER, Chunk, Stepper, check_num_steps
from zero_offload.storage import BlockFile
from zero_offload.update_rule import Rule

__all__ = ["BLOCK_NUMEL", "NvmeStepper"]

BLOCK_NUMEL = 1 << 20
"""Elements of a block: requests of 4 MiB, and for Adam 12 MiB of host memory per buffer."""


class NvmeStepper(Stepper):
    """An update rule over master weights and state in a file.

    Args:
        geometry: the flat space; shards of fp32, bf16 or fp16.
        rule: the update, of fp32 states that any stretch of elements may be cut from.
        groups: the ``param_groups``: what states hold at first.
        folder: on the NVMe disk; see `BlockFile`.
        buffer_count: blocks in host memory at once; 3 or more read, update and write together.
        block_numel: see [Note: blocks].

    Attributes:
        file: the `BlockFile`, with the counters of bytes and seconds.

    Raises:
        ValueError: the folder, the rule or a shard's dtype cannot be served.
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
        _check_served(geometry, rule)
        shards = range(len(geometry.shards))
        super().__init__(geometry, torch.device("cpu"), is_in_place=False, split=shards)
        self._rule = rule
        self._initial = [{n: rule.initial(n, group) for n in rule.states} for group in groups]
        self._dtypes = {MASTER: self.dtype, **rule.states}
        self._parts = {name: part for part, name in enumerate(self._dtypes)}
        self._blocks = list(_cut(geometry, block_numel))
        self._starts = [start for start, _ in self._blocks]
        self.file: BlockFile = BlockFile(
            folder,
            [(b - a) * dtype.itemsize for a, b in self._blocks for dtype in self._dtypes.values()],
            name="optimizer-state",
        )
        self._pipeline = BlockPipeline(self.file, len(self._dtypes), buffer_count)
        self._fill()

    @property
    def state_bytes(self) -> int:
        """Bytes of host memory that blocks pass through: all that there is of the state in it."""
        return self._pipeline.buffer_bytes

    def _fill(self) -> None:
        """Master weights from the shards; states that start at zero need no write."""
        nonzero = {n for initial in self._initial for n, value in initial.items() if value}
        written = [self._parts[name] for name in (MASTER, *self._dtypes) if name in nonzero]
        with torch.no_grad(), self._pass(range(len(self._blocks)), parts=()) as blocks:
            for start, stop, memory in blocks:
                shard = self.geometry.view(start, stop)
                if shard.is_meta:  # it rests elsewhere, and comes with the first write
                    memory[MASTER].zero_()
                else:
                    memory[MASTER].copy_(shard)
                for name in nonzero:
                    self._fill_state(name, start, stop, memory[name].zero_())
                self._pipeline.put(self._block_of(start), [self._parts[MASTER], *written])

    def _fill_state(self, name: str, start: int, stop: int, memory: Tensor) -> None:
        for piece in self.geometry.pieces:
            a, b = max(piece.start, start), min(piece.stop, stop)
            if a < b:
                memory[a - start : b - start] = self._initial[piece.group][name]

    def _block_of(self, element: int) -> int:
        return bisect_right(self._starts, element) - 1

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """``(block, a, b)``: the parts of ``[start, stop)`` that lie in blocks."""
        for block in range(max(self._block_of(start), 0), len(self._blocks)):
            low, high = self._blocks[block]
            if low >= stop:
                return
            if max(start, low) < min(stop, high):
                yield block, max(start, low), min(stop, high)

    def _take(self, block: int) -> dict[str, Tensor]:
        """The block's parts by name, once they are read."""
        memory = self._pipeline.take(block)
        return {n: memory[part].view(self._dtypes[n]) for n, part in self._parts.items()}

    @contextmanager
    def _pass(
        self, blocks: Sequence[int], parts: Sequence[int]
    ) -> Iterator[Iterator[tuple[int, int, dict[str, Tensor]]]]:
        """Blocks with ``parts`` of them read, one after another; written when the pass ends."""
        self._pipeline.announce(blocks, parts)
        try:
            yield ((*self._blocks[block], self._take(block)) for block in blocks)
            self._pipeline.flush()
        except BaseException:
            self._pipeline.abandon()
            raise

    def plan(
        self, active: Sequence[int], groups: Sequence[Mapping[str, Any]], grads: GradLedger
    ) -> list[Chunk]:
        """One chunk per block that has active pieces. They are announced to the pipeline."""
        pieces = self.geometry.pieces
        keys = {i: self._rule.hyper(groups[pieces[i].group], self.num_steps[i] + 1) for i in active}
        work: dict[int, list[Run]] = {}
        for run in plan_runs(self.geometry, active, keys):
            grads.segments(run.start, run.stop)  # refuses a missing gradient before any update
            for block, a, b in self._overlaps(run.start, run.stop):
                within = (i for i in run.pieces if pieces[i].start < b and a < pieces[i].stop)
                work.setdefault(block, []).append(Run(a, b, tuple(within), run.key))
        self._pipeline.announce(work)
        return [Chunk(tuple(runs), block) for block, runs in work.items()]

    def update(
        self,
        chunk: Chunk,
        grads: GradLedger,
        grad_scale: float,
        out: Callable[[int, int], Tensor],
    ) -> None:
        """Take the block, update its runs, and leave its write to the pipeline."""
        block: int = chunk.settings
        memory = self._take(block)
        for run in chunk.runs:
            self._update_run(run, memory, self._starts[block], grads, grad_scale, out)
        self._pipeline.put(block)

    def _update_run(
        self,
        run: Run,
        memory: Mapping[str, Tensor],
        base: int,
        grads: GradLedger,
        grad_scale: float,
        out: Callable[[int, int], Tensor],
    ) -> None:
        rounded = out(run.start, run.stop)
        for a, b, grad in grads.segments(run.start, run.stop):
            stretch = {name: values[a - base : b - base] for name, values in memory.items()}
            self._rule.update(
                stretch.pop(MASTER),
                grad if grad.dtype in KERNEL_DTYPES else grad.float(),
                stretch,
                run.key,
                grad_scale,
                rounded[a - run.start : b - run.start],
            )

    def settle(self) -> None:
        """Unless a further step waits, see to it that this one is in the file."""
        if self._pipeline.is_idle:
            self._pipeline.flush()

    def state_dtypes(self) -> Mapping[str, torch.dtype]:
        """The rule's states, fp32."""
        return self._rule.states

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
        """A copy, read from the file; zero between shards."""
        found = torch.zeros(stop - start, dtype=self._dtypes[name], device="cpu")
        spans = list(self._overlaps(start, stop))
        with self._pass([block for block, _, _ in spans], [self._parts[name]]) as blocks:
            for (block, a, b), (low, _, memory) in zip(spans, blocks, strict=True):
                found[a - start : b - start].copy_(memory[name][a - low : b - low])
                self._pipeline.drop(block)
        return found

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Overwrite a range in the file; what lies between shards is not kept.

        Blocks covered as a whole are not read first.
        """
        part = self._parts[name]
        for is_whole, spans in self._spans_by_cover(start, start + values.numel()):
            parts = [] if is_whole else [part]
            with self._pass([block for block, _, _ in spans], parts) as blocks:
                for (block, a, b), (low, _, memory) in zip(spans, blocks, strict=True):
                    memory[name][a - low : b - low].copy_(values[a - start : b - start])
                    self._pipeline.put(block, [part])

    def _spans_by_cover(
        self, start: int, stop: int
    ) -> list[tuple[bool, list[tuple[int, int, int]]]]:
        spans = list(self._overlaps(start, stop))
        whole = [(block, a, b) for block, a, b in spans if self._blocks[block] == (a, b)]
        return [(True, whole), (False, [span for span in spans if span not in whole])]

    def read_scalars(self, piece: int) -> dict[str, float]:
        """The count, and the same as torch keeps it."""
        count = self.num_steps[piece]
        own = dict.fromkeys(self._rule.scalars, float(count)) if count else {}
        return {"num_steps": count, **own}

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        """Take the count; what torch keeps beside it says the same."""
        count = check_num_steps(scalars)
        unknown = sorted(set(scalars) - {"num_steps", "step"})
        if unknown:
            raise ValueError(
                f"the state is another optimizer's: scalars {unknown} are unknown to this one"
            )
        if count == 0:
            self._clear(piece)
        self.num_steps[piece] = count

    def _clear(self, index: int) -> None:
        piece = self.geometry.pieces[index]
        for name, value in self._initial[piece.group].items():
            numel = piece.stop - piece.start
            self.write(name, piece.start, torch.full((numel,), value, device="cpu"))


def _cut(geometry: Geometry, block_numel: int) -> Iterator[tuple[int, int]]:
    """Each shard's range in blocks of at most ``block_numel`` elements."""
    for start, tensor in geometry.shards:
        stop = start + tensor.numel()
        for low in range(start, stop, block_numel):
            yield low, min(low + block_numel, stop)


def _check_served(geometry: Geometry, rule: Rule) -> None:
    if rule.block != 1 or rule.is_master_split:
        raise ValueError(
            f'offload_optimizer.device = "nvme" keeps fp32 state, not that of '
            f'{type(rule).__name__}: leave state_dtype at "float32", or use device "cpu"'
        )
    unserved = sorted({str(t.dtype) for _, t in geometry.shards if t.dtype not in KERNEL_DTYPES})
    if unserved:
        raise ValueError(
            f'offload_optimizer.device = "nvme" serves parameters of fp32, bf16 and fp16, not of '
            f'{", ".join(unserved)}: use device "cpu"'
        )
