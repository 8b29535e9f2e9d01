"""Optimizer state on NVMe in the engine: checkpoints that cross, errors and the plan.

That it has the bits of state in host memory is shown by rows of test_equalities.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

import zero_core
from zero_core.testing import Case, SimulatedRanks, batch, make_model, simulate, train
from zero_offload.steppers import file_stepper

pytestmark = pytest.mark.filterwarnings("ignore:the file system of .* has no direct I/O")
BLOCK_NUMEL = 100  # elements; the model's shards are several blocks each


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


def _build(ranks: SimulatedRanks, place: Place, folder: Path) -> zero_core.Engine:
    case = Case(place[1], "bf16", zero=_offload(place[0], folder))
    return zero_core.build(make_model(), case.config(), process_group=ranks)


def _save(
    ranks: SimulatedRanks, folder: Path, place: Place
) -> tuple[dict[str, torch.Tensor], list[float]]:
    engine = _build(ranks, place, folder)
    train(engine, [batch(step, 0, ranks.rank) for step in range(3)])
    engine.save_checkpoint(folder)
    return _everything(engine), train(engine, [batch(step, 0, ranks.rank) for step in (3, 4)])


def _load(
    ranks: SimulatedRanks, folder: Path, place: Place, kept: Any, losses: list[float]
) -> None:
    engine = _build(ranks, place, folder)
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
    monkeypatch.setattr(file_stepper, "BLOCK_NUMEL", BLOCK_NUMEL)
    found = simulate(_save, saved[2], tmp_path, saved)[0]
    simulate(_load, loaded[2], tmp_path, loaded, *found)


def test_a_folder_that_does_not_exist_is_a_config_error() -> None:
    zero = _offload("nvme", "/no/such/folder")
    with pytest.raises(zero_core.ConfigError, match="'/no/such/folder' does not exist"):
        zero_core.build(make_model(), Case(zero=zero).config())


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
