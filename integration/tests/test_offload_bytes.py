"""Bytes that a step moves from and to files: those of the closed form in docs/offload.md."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpu_adam
import zero_core
import zero_offload
from zero_core.layout.arithmetic import Segment
from zero_core.testing import SimulatedRanks, seeded, simulate
from zero_offload.memory.direct_io import ALIGNMENT
from zero_offload.memory.storage import BlockFile
from zero_offload.param_tier import OffloadedParams
from zero_offload.steppers import file_stepper
from zero_offload.tiers.twin import TwinTier

WIDTH, DEPTH, VOCAB = 13, 7, 29
BLOCK_NUMEL = 390
"""Elements of a block of states, so that a shard has several, and some have padding alone."""
WARMUP, STEPS = 2, 4
"""The first update of a shard reads what it leaves out, as padding."""
BUFFERS = 3
"""For parameters."""
STATES = 3
"""fp32 numbers per element: the master weight and Adam's moments."""


class _Net(nn.Module):
    """A root, odd blocks of different sizes, more of them than buffers."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(0):
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 17 + n), nn.Tanh(), nn.Linear(17 + n, WIDTH))
                for n in range(DEPTH)
            )
            self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


class _Kept:
    """Factories whose tiers stay in reach."""

    def __init__(self) -> None:
        self.params: OffloadedParams | None = None
        self.states: TwinTier | None = None

    def make_params(self, **parts: Any) -> OffloadedParams:
        self.params = zero_offload.create_param_tier(**parts)
        return self.params

    def make_states(self, **parts: Any) -> TwinTier:
        self.states = zero_offload.create_tier(**{**parts, "adam_kernel": cpu_adam})
        return self.states

    def traffic(self) -> list[tuple[int, int]]:
        """Bytes read and written so far, of parameters and of states."""
        assert self.params is not None
        assert self.states is not None
        states = self.states.file_traffic()  # it writes parameters, too
        return [self.params.file_traffic(), states]

    def files(self) -> list[BlockFile]:
        """The files of parameters and of states."""
        assert self.params is not None
        assert self.params.file is not None
        assert self.states is not None
        assert self.states.file is not None
        return [self.params.file.blocks, self.states.file]


def _config(folder: str, dtype: str, micro_batches: int, schedule: str) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": folder}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "accumulation_schedule": schedule,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "offload_param": {**nvme, "max_in_cpu": 0, "buffer_count": BUFFERS},
            "offload_optimizer": {**nvme, "buffer_count": 3},
        },
        **({"bf16": {"enabled": True}} if dtype == "bf16" else {}),
    }


def _batches(rank: int) -> Any:
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randint(VOCAB, (1, 5), generator=generator)


def _counted(
    ranks: SimulatedRanks, config: dict[str, Any]
) -> tuple[list[float], list[tuple[int, int]], zero_core.Engine]:
    """Losses, and the bytes that all steps read and wrote, of parameters and states.

    Nothing waits between two steps: forwards begin while states are updated.
    """
    kept = _Kept()
    engine = zero_core.build(
        *(_Net(), config),
        process_group=ranks,
        param_tier=kept.make_params,
        state_tier=kept.make_states,
    )
    batches = _batches(ranks.rank)
    losses = [engine.train_batch(batches) for _ in range(WARMUP)]
    before = kept.traffic()
    losses += [engine.train_batch(batches) for _ in range(STEPS)]
    moved = [
        (after[0] - first[0], after[1] - first[1])
        for first, after in zip(before, kept.traffic(), strict=True)
    ]
    return [float(loss) for loss in losses], moved, engine


def _closed_form(engine: zero_core.Engine, passes: int) -> list[tuple[int, int]]:
    """Bytes read and written of parameters and of states, by the sizes of the shards alone."""
    layout = engine.sharded_state.layout
    units = [sum(s.shard_numel * s.dtype.itemsize for s in u.segments) for u in layout.units]
    numel = sum(_updated(segment, engine.rank) for segment in layout.segments)
    blocks = units[1 : layout.last_block + 1]
    tail = units[layout.last_block + 1 :]
    read = units[0] + 2 * sum(blocks) - blocks[-1] + sum(tail)
    before_last = sum(blocks[-BUFFERS + len(tail) : -1])
    first = sum(blocks[: BUFFERS - 1])
    read = passes * (read - before_last) - (passes - 1) * first
    return [(read, sum(units)), (4 * STATES * numel, 4 * STATES * numel)]


def _updated(segment: Segment, rank: int) -> int:
    """Elements of a shard in those blocks of states that are not padding alone."""
    low, high = segment.shard_range(rank)
    blocks = ((a, min(a + BLOCK_NUMEL, high)) for a in range(low, high, BLOCK_NUMEL))
    used = [(a, b) for a, b in blocks if any(s.start < b and s.stop > a for s in segment.slots)]
    return sum(b - a for a, b in used)


def _check(ranks: SimulatedRanks, folder: str, dtype: str, micro_batches: int) -> None:
    found = {}
    for schedule in ("horizontal", "vertical"):
        config = _config(folder, dtype, micro_batches, schedule)
        losses, moved, engine = _counted(ranks, config)
        passes = micro_batches if schedule == "horizontal" else 1
        step = _closed_form(engine, passes)
        assert moved == [(STEPS * read, STEPS * written) for read, written in step], schedule
        found[schedule] = losses
        engine.close()
    assert found["vertical"] == found["horizontal"]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_stepper, "BLOCK_NUMEL", BLOCK_NUMEL)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("micro_batches", [1, 4, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [(1, "fp32"), pytest.param(2, "fp32", marks=pytest.mark.slow), (2, "bf16")],
)
@pytest.mark.filterwarnings("ignore:the file system of .* has no direct I/O")
def test_a_step_moves_the_bytes_of_the_closed_form(
    world_size: int, dtype: str, micro_batches: int, tmp_path: Path
) -> None:
    simulate(_check, world_size, str(tmp_path), dtype, micro_batches)


@pytest.mark.filterwarnings("ignore:the file system of .* has no direct I/O")
def test_the_system_moves_whole_blocks_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """System calls move each block of a file rounded up, or in full where they bypass nothing."""
    moved = {"read": 0, "written": 0}

    def counting(call: Callable[..., int], name: str) -> Callable[..., int]:
        def run(fd: int, views: Sequence[Any], offset: int) -> int:
            found = call(fd, views, offset)
            moved[name] += found
            return found

        return run

    kept = _Kept()
    engine = zero_core.build(
        *(_Net(), _config(str(tmp_path), "fp32", 4, "vertical")),
        param_tier=kept.make_params,
        state_tier=kept.make_states,
    )
    batches = _batches(0)
    for _ in range(WARMUP):
        engine.train_batch(batches)
    kept.traffic()
    monkeypatch.setattr(os, "preadv", counting(os.preadv, "read"))
    monkeypatch.setattr(os, "pwritev", counting(os.pwritev, "written"))
    engine.train_batch(batches)
    kept.traffic()
    params, states = kept.files()

    def rounded(file: BlockFile) -> list[int]:
        return [-(-size // ALIGNMENT) * ALIGNMENT for size in file.block_bytes]

    units, all_states = rounded(params), sum(rounded(states))
    root, *blocks = units
    assert moved["written"] == sum(units) + all_states
    found = sum(blocks[-BUFFERS:-1])
    assert moved["read"] == root + 2 * sum(blocks) - blocks[-1] - found + all_states
    engine.close()
