"""Saves beside training of states that the host updates, in memory and on NVMe."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import zero_core
from zero_core.sharded import snapshot
from zero_core.testing import Case, GatedRanks, SimulatedRanks, batch, make_model, simulate


def _train(engine: zero_core.Engine, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(**batch(step, 0, engine.rank))["loss"])
        engine.step()


def _save(ranks: SimulatedRanks, folder: Path, config: dict[str, Any]) -> None:
    gated = GatedRanks(**vars(ranks))
    engine = zero_core.build(make_model(), config, process_group=gated)
    _train(engine, 0, 3)
    pending = engine.async_save(folder / "beside")
    _train(engine, 3, 4)  # nothing is written yet: every state is overtaken
    threading.Timer(0.01, gated.gate.set).start()
    _train(engine, 4, 6)
    pending.result()
    again = engine.async_save(folder / "beside")  # written while the next step is computed
    _train(engine, 6, 7)
    again.result()
    engine.close()
    straight = zero_core.build(make_model(), config, process_group=ranks)
    for first, last in ((0, 3), (3, 6)):
        _train(straight, first, last)
        straight.save_checkpoint(folder / "at-once")
    straight.close()


@pytest.mark.parametrize(
    ("world_size", "stage", "dtype", "offload"),
    [
        (2, 2, "fp32", {"ratio": 0.5}),
        (1, 3, "bf16", {"ratio": 1.0, "state_dtype": "bfloat16"}),
        (2, 1, "fp32", {"ratio": "auto"}),
        (2, 3, "bf16", {"device": "nvme"}),
    ],
)
def test_a_save_that_updates_overtake_has_the_bytes_of_one_at_once(
    tmp_path, monkeypatch, world_size, stage, dtype, offload
):
    monkeypatch.setattr(snapshot, "BLOCK_NUMEL", 61)
    if offload.get("device") == "nvme":
        (tmp_path / "nvme").mkdir()
        offload = {**offload, "nvme_path": str(tmp_path / "nvme")}
    case = Case(stage=stage, dtype=dtype, zero={"offload_optimizer": {"device": "cpu", **offload}})
    simulate(_save, world_size, tmp_path, case.config())
    for tag in ("step-3", "step-6"):
        at_once = sorted((tmp_path / "at-once" / tag).iterdir())
        assert len(at_once) > 3
        for file in at_once:
            assert (tmp_path / "beside" / tag / file.name).read_bytes() == file.read_bytes()
