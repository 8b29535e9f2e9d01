"""Optimizer state on NVMe in the engine: the numbers of host memory, and checkpoints that cross."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import zero_core
from zero_core.testing import Case, Gap, batch, compare_with_ddp, make_model, read_gaps, spawn
from zero_offload.steppers import file_stepper

STEPS = 4
# As in test_equivalence.py: the host kernel and DDP round in another order.
LOSS = {"fp32": 4e-6, "bf16": 0.07}
VALUE = {"fp32": 2e-6, "bf16": 0.04}
BLOCK_NUMEL = 100  # elements; the model's shards are several blocks each


def _offload(device: str, folder: Path | str, ratio: float = 1.0) -> dict[str, Any]:
    if device == "none":
        return {}
    place = {"nvme_path": str(folder), "buffer_count": 3} if device == "nvme" else {}
    return {"offload_optimizer": {"device": device, "ratio": ratio, **place}}


def _cases(folder: Path) -> list[Case]:
    """For each precision: host memory at stage 1, then the file; in fp32 at every stage."""
    compact = [
        Case(3, "bf16", zero={"offload_optimizer": {**block, "state_dtype": "int8"}})
        for block in (_offload(d, folder)["offload_optimizer"] for d in ("cpu", "nvme"))
    ]
    return compact + [
        Case(stage, dtype, accumulation=2, clipping=0.5, zero=_offload(device, folder, ratio))
        for dtype in ("fp32", "bf16")
        for device, stage, ratio in (
            ("cpu", 1, 1.0),
            ("nvme", 0, 1.0),
            ("nvme", 1, 1.0),
            ("nvme", 2, 1.0),
            ("nvme", 3, 1.0),
            ("nvme", 3, 0.4),
        )
        if dtype == "fp32" or stage in (1, 3)
    ]


def _use_small_blocks() -> None:
    """In a process of this test's own."""
    file_stepper.BLOCK_NUMEL = BLOCK_NUMEL


def _compare(rank: int, world_size: int, cases: list[Case], folder: str) -> None:
    _use_small_blocks()
    compare_with_ddp(rank, world_size, cases, folder, STEPS)


@pytest.fixture(
    scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 3], ids=lambda n: f"{n}ranks"
)
def grid(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[Case, Gap]]:
    world_size: int = request.param
    gaps, disk = tmp_path_factory.mktemp("gaps"), tmp_path_factory.mktemp("disk")
    cases = _cases(disk)
    spawn(_compare, world_size, cases, str(gaps))
    assert list(disk.iterdir()) == []
    found = read_gaps(gaps, world_size)
    return [(case, found[index]) for index, case in enumerate(cases)]


def test_state_on_nvme_gives_the_bits_of_host_memory_at_every_stage(
    grid: list[tuple[Case, Gap]],
) -> None:
    for case, gap in grid:
        assert gap.across_stages == 0.0, case
        if "state_dtype" not in case.zero["offload_optimizer"]:
            assert gap.loss <= LOSS[case.dtype], case
            assert gap.value <= VALUE[case.dtype], case


def _build(stage: int, device: str, disk: str) -> zero_core.Engine:
    _use_small_blocks()
    case = Case(stage, "bf16", zero=_offload(device, disk))
    return zero_core.build(make_model(), case.config())


def _train(engine: zero_core.Engine, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = engine(**batch(step, 0, engine.rank))["loss"]
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _everything(engine: zero_core.Engine) -> dict[str, torch.Tensor]:
    """Master weights and moments of every trainable parameter, whole."""
    state = engine.sharded_state
    found = {}
    for segment in state.layout.segments:
        for name in ("master_weight", "exp_avg", "exp_avg_sq") if segment.is_trainable else ():
            full = state.control.gather(state.own_state(segment.index, name))
            for slot in segment.slots:
                key = f"{name}/{state.layout.params[slot.param].name}"
                found[key] = full[slot.start : slot.stop].clone()
    return found


def _save(rank: int, world_size: int, folder: str, stage: int, device: str) -> None:
    engine = _build(stage, device, folder)
    _train(engine, 0, 3)
    engine.save_checkpoint(folder)
    kept = _everything(engine)
    losses = _train(engine, 3, 5)
    if rank == 0:
        torch.save((kept, losses), Path(folder) / "kept.pt")


def _load(rank: int, world_size: int, folder: str, stage: int, device: str) -> None:
    engine = _build(stage, device, folder)
    _train(engine, 5, 6)  # whatever was there is replaced
    engine.load_checkpoint(folder)
    kept, losses = torch.load(Path(folder) / "kept.pt", weights_only=True)
    found = _everything(engine)
    assert kept.keys() == found.keys()
    for key, value in kept.items():
        assert torch.equal(found[key], value), key
    continued = _train(engine, 3, 5)
    if rank == 0 and world_size == 2:
        # The host gets gradients in bf16, the device's own tier in fp32.
        assert continued == pytest.approx(losses, abs=LOSS["bf16"])


@pytest.mark.sampled(3)
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
def test_checkpoints_cross_between_nvme_host_and_device(
    tmp_path: Path, saved: tuple[str, int, int], loaded: tuple[str, int, int]
) -> None:
    spawn(_save, saved[2], str(tmp_path), saved[1], saved[0])
    spawn(_load, loaded[2], str(tmp_path), loaded[1], loaded[0])


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({}, r"needs zero_optimization\.offload_optimizer\.nvme_path"),
        ({"nvme_path": "/no/such/folder"}, "'/no/such/folder' does not exist"),
        ({"nvme_path": os.devnull}, "is not a folder"),
    ],
)
def test_what_cannot_be_served_on_nvme_is_a_config_error(keys: dict[str, str], match: str) -> None:
    zero = {"offload_optimizer": {"device": "nvme", **keys}}
    with pytest.raises(zero_core.ConfigError, match=match):
        zero_core.build(make_model(), Case(zero=zero).config())


@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
@pytest.mark.parametrize("ratio", [0.0, 0.4, 1.0])
@pytest.mark.filterwarnings("ignore:the file system of .* has no direct I/O")
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
