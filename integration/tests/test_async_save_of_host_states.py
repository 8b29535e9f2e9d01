"""Saves beside training: of states that the host updates, and beside copies in memory."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_core
from zero_core.sharded import snapshot
from zero_core.testing import Case, GatedRanks, SimulatedRanks, batch, make_model, simulate
from zero_core.testing.training import assert_same


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "BLOCK_NUMEL", 61)


def _train(engine: zero_core.Engine, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(**batch(step, 0, engine.rank))["loss"])
        engine.step(client_state={"step": step + 1})


def _restart(
    ranks: SimulatedRanks, folder: Path, config: dict[str, Any]
) -> tuple[int, dict[str, torch.Tensor]]:
    """Train as a program that is started anew after step 6 if there are copies in memory."""
    gated = GatedRanks(**vars(ranks))
    engine = zero_core.build(make_model(), config, process_group=gated)
    first = (engine.resume(folder / "beside") or {"step": 0})["step"]
    if first:
        gated.gate.set()
    else:
        # Steps overtake the save of step 3 before anything is written.
        _train(engine, 0, 3)
        pending = engine.async_save(folder / "beside")
        _train(engine, 3, 5)
        threading.Timer(0.01, gated.gate.set).start()
        _train(engine, 5, 6)
        pending.result()
    has_copies = "memory_checkpoint" in config
    if first or not has_copies:
        again = engine.async_save(folder / "beside")  # written while the next steps are computed
        _train(engine, 6, 8)
        again.result()
    values = engine.full_state_dict()
    with engine.rewriting() if has_copies else nullcontext():  # the last copy is whole
        pass
    engine.close()
    return first, values


def _straight(ranks: SimulatedRanks, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    engine = zero_core.build(make_model(), config, process_group=ranks)
    for first, last in ((0, 3), (3, 6)):
        _train(engine, first, last)
        engine.save_checkpoint(folder / "at-once")
    _train(engine, 6, 8)
    return engine.full_state_dict()


@pytest.mark.parametrize(
    ("world_size", "stage", "dtype", "offload", "has_copies"),
    [
        (2, 2, "fp32", {"device": "cpu", "ratio": 0.5}, False),
        (1, 3, "bf16", {"device": "cpu", "state_dtype": "bfloat16"}, False),
        (2, 1, "fp32", {"device": "cpu", "ratio": "auto"}, False),
        (2, 3, "bf16", {"device": "nvme"}, False),
        (2, 3, "fp32", {}, True),
        (1, 2, "bf16", {"device": "cpu", "ratio": 0.5}, True),
    ],
)
def test_a_save_that_updates_overtake_has_the_bytes_of_one_at_once(
    tmp_path, world_size, stage, dtype, offload, has_copies
):
    """A restart goes on from the last copies in memory, if there are any."""
    block = offload and {"nvme_path": str(tmp_path), **offload}
    config = Case(stage, dtype, zero={"offload_optimizer": block}).config()
    copies = {"memory_checkpoint": {"path": str(tmp_path / "memory")}} if has_copies else {}
    for first in (0, 6)[: 1 + has_copies]:
        found = simulate(_restart, world_size, tmp_path, config | copies)
        assert {step for step, _ in found} == {first}
    assert_same([values for _, values in found], simulate(_straight, world_size, tmp_path, config))
    for tag in ("step-3", "step-6"):
        at_once = sorted((tmp_path / "at-once" / tag).iterdir())
        assert len(at_once) > 3
        for file in at_once:
            if file.name != "manifest.json" or not has_copies:
                assert (tmp_path / "beside" / tag / file.name).read_bytes() == file.read_bytes()
