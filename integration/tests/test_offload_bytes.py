"""States and parameters in files: bytes per step, compared with a closed form."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from torch import Tensor

import zero_core
import zero_offload
from zero_core.layout.arithmetic import Segment
from zero_core.testing import Case, SimulatedRanks, make_model, make_tower, on_ranks, rows
from zero_offload.param_tier import OffloadedParams
from zero_offload.steppers import file_stepper

pytestmark = pytest.mark.filterwarnings("ignore:the file system of .* has no direct I/O")
WIDTH, DEPTH = 13, 7
BLOCK_NUMEL = 390
"""Elements per block of states. A shard has one or two blocks."""
WARMUP, STEPS = 2, 2
"""Uncounted and counted steps."""
BUFFERS = 3
STATES = 3
"""fp32 numbers per element: the master weight and Adam's moments."""


def _build(
    folder: Path, dtype: str, micro_batches: int, schedule: str, ranks: SimulatedRanks | None = None
) -> tuple[zero_core.Engine, list[Any]]:
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    zero = {
        "stage3_param_persistence_threshold": 0,
        "offload_param": {**nvme, "max_in_cpu": 0, "buffer_count": BUFFERS},
        "offload_optimizer": {**nvme, "buffer_count": 3},
    }
    top = {"accumulation_schedule": schedule}
    tiers: list[Any] = []

    def keep_params(**parts: Any) -> OffloadedParams:
        tiers.append(zero_offload.create_param_tier(**parts))
        return tiers[0]

    engine = zero_core.build(
        make_tower(DEPTH, WIDTH),
        Case(3, dtype, micro_batches, zero=zero, top=top).config(),
        process_group=ranks,
        param_tier=keep_params,
    )
    return engine, [*tiers, engine.sharded_state.tier]


def _traffic(tiers: list[Any]) -> list[tuple[int, int]]:
    params, states = tiers
    of_states = states.file_traffic()
    return [params.file_traffic(), of_states]


def _batches(rank: int) -> Iterator[Tensor]:
    return (rows(number, rank, WIDTH) for number in itertools.count())


def _closed_form(engine: zero_core.Engine, passes: int) -> list[tuple[int, int]]:
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
    """Return how many elements of a shard are in blocks of states that are not all padding."""
    low, high = segment.shard_range(rank)
    blocks = ((a, min(a + BLOCK_NUMEL, high)) for a in range(low, high, BLOCK_NUMEL))
    used = [(a, b) for a, b in blocks if any(s.start < b and s.stop > a for s in segment.slots)]
    return sum(b - a for a, b in used)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(("world_size", "dtype"), [(1, "fp32"), (2, "bf16")])
@on_ranks()
def test_a_step_moves_the_bytes_of_the_closed_form(
    ranks, dtype, micro_batches, tmp_path, monkeypatch
):
    """Steps run without a pause, so forwards start while states are being updated."""
    monkeypatch.setattr(file_stepper, "BLOCK_NUMEL", BLOCK_NUMEL)
    found = {}
    for schedule, passes in (("horizontal", micro_batches), ("vertical", 1)):
        engine, tiers = _build(tmp_path, dtype, micro_batches, schedule, ranks)
        batches = _batches(ranks.rank)
        found[schedule] = [engine.train_batch(batches).item() for _ in range(WARMUP)]
        before = _traffic(tiers)
        found[schedule] += [engine.train_batch(batches).item() for _ in range(STEPS)]
        for first, last, step in zip(
            before, _traffic(tiers), _closed_form(engine, passes), strict=True
        ):
            assert [b - a for a, b in zip(first, last, strict=True)] == [STEPS * n for n in step]
        engine.close()
    assert found["vertical"] == found["horizontal"]


@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
@pytest.mark.parametrize("ratio", [0.0, 0.4, 1.0])
def test_a_plan_knows_the_file_and_that_memory_is_taken_for_buffers_alone(
    tmp_path: Path, ratio: float, state_dtype: str
) -> None:
    file = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 3}
    zero = {"offload_optimizer": {**file, "ratio": ratio, "state_dtype": state_dtype}}
    config = Case(3, "bf16", zero=zero).config()
    engine = zero_core.build(make_model(), config)
    plan = zero_core.plan(make_model(), config, 1, device_type="cpu")
    host, tier = plan.memory.host, cast("Any", engine.sharded_state.tier)
    assert plan.configured.file_bytes == (sum(tier.file.block_bytes) if ratio else 0)
    held = tier.report()[0].tier.host_bytes if ratio else 0
    assert host.get("NVMe buffers", 0) == held
    assert {"master weights", "optimizer states"}.isdisjoint(host)
    engine.close()
