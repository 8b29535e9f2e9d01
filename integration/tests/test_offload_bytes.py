"""States and parameters in files: bytes that a step moves, checkpoints that cross, and the plan.

The bytes are those of the closed form in docs/offload.md. That a file has the bits of host memory
is shown by rows of test_equalities.py.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import zero_core
import zero_offload
from zero_core.layout.arithmetic import Segment
from zero_core.testing import (
    Case,
    SimulatedRanks,
    batch,
    make_model,
    make_tower,
    on_ranks,
    rows,
    simulate,
    train,
)
from zero_offload.memory.direct_io import ALIGNMENT
from zero_offload.memory.storage import BlockFile
from zero_offload.param_tier import OffloadedParams
from zero_offload.steppers import file_stepper

pytestmark = pytest.mark.filterwarnings("ignore:the file system of .* has no direct I/O")
WIDTH, DEPTH = 13, 7
BLOCK_NUMEL = 390
"""Elements of a block of states, so that a shard has several, and some have padding alone."""
WARMUP, STEPS = 2, 4
"""The first update of a shard reads what it leaves out, as padding."""
BUFFERS = 3
"""For parameters."""
STATES = 3
"""fp32 numbers per element: the master weight and Adam's moments."""


def _build(
    folder: Path, dtype: str, micro_batches: int, schedule: str, ranks: SimulatedRanks | None = None
) -> tuple[zero_core.Engine, list[Any]]:
    """Return an engine, and its tiers of parameters and of states."""
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
    """Return the bytes read and written so far, of parameters and of states."""
    params, states = tiers
    of_states = states.file_traffic()  # it writes parameters, too
    return [params.file_traffic(), of_states]


def _batches(rank: int) -> Iterator[Tensor]:
    return (rows(number, rank, WIDTH) for number in itertools.count())


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


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_stepper, "BLOCK_NUMEL", BLOCK_NUMEL)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("micro_batches", [1, 4, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [(1, "fp32"), pytest.param(2, "fp32", marks=pytest.mark.slow), (2, "bf16")],
)
@on_ranks()
def test_a_step_moves_the_bytes_of_the_closed_form(ranks, dtype, micro_batches, tmp_path):
    """Nothing waits between two steps: forwards begin while states are updated."""
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


@pytest.mark.usefixtures("_small_blocks")
def test_the_system_moves_whole_blocks_of_the_disk(tmp_path, monkeypatch):
    """System calls move each block of a file rounded up, or in full where they bypass nothing."""
    moved = {"preadv": 0, "pwritev": 0}

    def count(name: str, call: Callable[..., int], *args: Any) -> int:
        found = call(*args)
        moved[name] += found
        return found

    engine, tiers = _build(tmp_path, "fp32", 4, "vertical")
    batches = _batches(0)
    for _ in range(WARMUP):
        engine.train_batch(batches)
    _traffic(tiers)
    for name in moved:
        monkeypatch.setattr(os, name, partial(count, name, getattr(os, name)))
    engine.train_batch(batches)
    _traffic(tiers)

    def rounded(file: BlockFile) -> list[int]:
        return [-(-size // ALIGNMENT) * ALIGNMENT for size in file.block_bytes]

    units, all_states = rounded(tiers[0].file.blocks), sum(rounded(tiers[1].file))
    root, *blocks = units
    assert moved["pwritev"] == sum(units) + all_states
    found = sum(blocks[-BUFFERS:-1])
    assert moved["preadv"] == root + 2 * sum(blocks) - blocks[-1] - found + all_states
    engine.close()


CROSSING_NUMEL = 100  # elements; the model's shards are several blocks each


def _offload(device: str, folder: Path | str, ratio: float = 1.0) -> dict[str, Any]:
    if device == "none":
        return {}
    place = {"nvme_path": str(folder), "buffer_count": 3} if device == "nvme" else {}
    return {"offload_optimizer": {"device": device, "ratio": ratio, **place}}


def _everything(engine: zero_core.Engine) -> dict[str, torch.Tensor]:
    """Master weights and moments of every trainable parameter, whole."""
    trained = [name for name, p in engine.module.named_parameters() if p.requires_grad]
    kinds = ("master_weight", "exp_avg", "exp_avg_sq")
    return {f"{kind}/{n}": engine.states.get_full(n, kind) for kind in kinds for n in trained}


Place = tuple[str, int, int]
"""Device of the states, stage, and number of ranks."""


def _build_at(ranks: SimulatedRanks, place: Place, folder: Path) -> zero_core.Engine:
    case = Case(place[1], "bf16", zero=_offload(place[0], folder))
    return zero_core.build(make_model(), case.config(), process_group=ranks)


def _save(
    ranks: SimulatedRanks, folder: Path, place: Place
) -> tuple[dict[str, torch.Tensor], list[float]]:
    engine = _build_at(ranks, place, folder)
    train(engine, [batch(step, 0, ranks.rank) for step in range(3)])
    engine.save_checkpoint(folder)
    return _everything(engine), train(engine, [batch(step, 0, ranks.rank) for step in (3, 4)])


def _load(
    ranks: SimulatedRanks, folder: Path, place: Place, kept: Any, losses: list[float]
) -> None:
    engine = _build_at(ranks, place, folder)
    train(engine, [batch(5, 0, ranks.rank)])  # whatever was there is replaced
    engine.load_checkpoint(folder)
    torch.testing.assert_close(_everything(engine), kept, rtol=0.0, atol=0.0)
    continued = train(engine, [batch(step, 0, ranks.rank) for step in (3, 4)])
    if ranks.rank == 0 and ranks.size == 2:
        # The host gets gradients in bf16, the device's own tier in fp32.
        assert continued == pytest.approx(losses, abs=0.07)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("nvme", 3, 2), ("cpu", 1, 1)),
        (("cpu", 2, 2), ("nvme", 3, 2)),
        (("nvme", 1, 2), ("none", 3, 2)),
        (("none", 3, 2), ("nvme", 2, 3)),
    ],
    ids=["nvme-cpu", "cpu-nvme", "nvme-none", "none-nvme"],
)
def test_checkpoints_cross_between_nvme_host_and_device(tmp_path, monkeypatch, saved, loaded):
    monkeypatch.setattr(file_stepper, "BLOCK_NUMEL", CROSSING_NUMEL)
    found = simulate(_save, saved[2], tmp_path, saved)[0]
    simulate(_load, loaded[2], tmp_path, loaded, *found)


@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
@pytest.mark.parametrize("ratio", [0.0, 0.4, 1.0])
def test_a_plan_knows_the_file_and_that_memory_is_taken_for_buffers_alone(
    tmp_path: Path, ratio: float, state_dtype: str
) -> None:
    zero = _offload("nvme", tmp_path, ratio)
    zero["offload_optimizer"]["state_dtype"] = state_dtype
    config = Case(3, "bf16", zero=zero).config()
    engine = zero_core.build(make_model(), config)
    plan = zero_core.plan(make_model(), config, 1, device_type="cpu")
    host, tier = plan.memory.host, cast("Any", engine.sharded_state.tier)
    assert plan.configured.file_bytes == (sum(tier.file.block_bytes) if ratio else 0)
    held = tier.report()[0].tier.host_bytes if ratio else 0
    assert host.get("NVMe buffers", 0) == held
    assert {"master weights", "optimizer states"}.isdisjoint(host)
    engine.close()
