"""Blocks in a pipeline of few buffers: order, memory bound, and overlap."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiers import wait_until
from torch import Tensor

from zero_offload.memory.storage import BlockFile
from zero_offload.steppers.file_stepper import BlockPipeline

pytestmark = pytest.mark.filterwarnings("ignore:the file system of .* has no direct I/O")
TIMEOUT_S = 120.0
NUM_PARTS = 2


class LoggedFile(BlockFile):
    """File that logs its transfers, and delays those in ``gates`` until their event is set."""

    def __init__(self, folder: Path, sizes: Sequence[int]) -> None:
        super().__init__(folder, sizes)
        self.log: list[str] = []
        self.gates: dict[str, threading.Event] = {}

    def _logged(self, job: Callable[[int, Tensor], None], what: str, block: int, t: Tensor) -> None:
        name = f"{what} {block}"
        self.log.append(f"begin {name}")
        if name in self.gates:
            assert self.gates[name].wait(TIMEOUT_S)
        job(block, t)
        self.log.append(f"end {name}")

    def read_block(self, block: int, tensor: Tensor) -> None:
        self._logged(super().read_block, "read", block, tensor)

    def write_block(self, block: int, tensor: Tensor) -> None:
        self._logged(super().write_block, "write", block, tensor)


def _sizes(num_blocks: int) -> list[int]:
    return [100 + record for record in range(num_blocks * NUM_PARTS)]


def _check(file: BlockFile, expected: Sequence[int]) -> None:
    for record, size in enumerate(file.block_bytes):
        found = torch.full((size,), 99, dtype=torch.uint8)
        file.read(record, found).wait()
        assert found.eq(expected[record // NUM_PARTS]).all()


def _add_one(pipeline: BlockPipeline, blocks: Sequence[int]) -> None:
    pipeline.announce(blocks)
    for block in blocks:
        for part in pipeline.take(block):
            part += 1
        pipeline.put(block)


@settings(max_examples=25, deadline=None)
@given(
    num_blocks=st.integers(1, 6),
    buffer_count=st.integers(1, 8),
    passes=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 5), max_size=8)), max_size=4),
)
def test_every_update_of_every_block_counts(
    tmp_path_factory: pytest.TempPathFactory,
    num_blocks: int,
    buffer_count: int,
    passes: list[tuple[bool, list[int]]],
) -> None:
    """Blocks are used in any order and repeatedly, within a pass and across passes."""
    file = BlockFile(tmp_path_factory.getbasetemp(), _sizes(num_blocks))
    pipeline = BlockPipeline(file, NUM_PARTS, buffer_count)
    expected = [0] * num_blocks
    for is_prefetched, chosen in passes:
        if is_prefetched:
            pipeline.flush()
            pipeline.prefetch()
        blocks = [block % num_blocks for block in chosen]
        _add_one(pipeline, blocks)
        for block in blocks:
            expected[block] += 1
    pipeline.flush()
    pipeline.abandon()  # waits for prefetched blocks
    _check(file, expected)
    file.close()


def test_what_followed_last_time_is_read_before_it_is_announced(tmp_path: Path) -> None:
    file = LoggedFile(tmp_path, _sizes(5))
    pipeline = BlockPipeline(file, NUM_PARTS, 3)
    for order in ([3, 1, 4, 0, 2], [3, 1, 4, 0, 2]):
        _add_one(pipeline, order)
        pipeline.flush()
        pipeline.prefetch()
    assert list(pipeline.prefetched) == [3, 1, 4]
    wait_until(lambda: sum(entry.startswith("end read") for entry in file.log) >= 10 + 6 + 4 + 6)
    file.log.clear()
    _add_one(pipeline, [3, 1, 4, 0, 2])
    pipeline.flush()
    reads = [entry for entry in file.log if entry.startswith("begin read")]
    # two records each of blocks 0 and 2
    assert sorted(int(entry.split()[-1]) for entry in reads) == [0, 1, 4, 5]
    _check(file, [3] * 5)


def test_memory_is_bounded_by_the_buffers(tmp_path: Path) -> None:
    file = BlockFile(tmp_path, _sizes(9))
    longest = sum(sorted(_sizes(9))[-NUM_PARTS:])
    pipeline = BlockPipeline(file, NUM_PARTS, 4)
    seen: set[int] = set()
    for _ in range(2):
        pipeline.announce(range(9))
        for block in range(9):
            seen |= {part.untyped_storage().data_ptr() for part in pipeline.take(block)}
            assert pipeline.buffer_bytes == 4 * longest
            pipeline.put(block)
    assert len(seen) <= 4 * NUM_PARTS
    assert BlockPipeline(file, NUM_PARTS, 99).buffer_bytes == 9 * longest


def test_only_the_parts_asked_for_are_moved(tmp_path: Path) -> None:
    file = LoggedFile(tmp_path, _sizes(2))
    pipeline = BlockPipeline(file, NUM_PARTS, 2)
    pipeline.announce([1], parts=[0])
    pipeline.take(1)[1].fill_(5)
    pipeline.put(1, parts=[1])
    pipeline.flush()
    assert [entry for entry in file.log if entry.startswith("end")] == ["end read 2", "end write 3"]
