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


def _check_bytes(folder: Path, *differing: str) -> None:
    for tag in ("step-3", "step-6"):
        at_once = sorted((folder / "at-once" / tag).iterdir())
        assert len(at_once) > 3
        for file in at_once:
            written = (folder / "beside" / tag / file.name).read_bytes()
            assert file.name in differing or written == file.read_bytes(), file


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
    tmp_path, world_size, stage, dtype, offload
):
    block = {"device": "cpu", "nvme_path": str(tmp_path), **offload}
    config = Case(stage, dtype, zero={"offload_optimizer": block}).config()
    simulate(_restart, world_size, tmp_path, config)
    simulate(_straight, world_size, tmp_path, config)
    _check_bytes(tmp_path)


@pytest.mark.parametrize(
    ("world_size", "stage", "dtype", "offload"),
    [(2, 3, "fp32", {}), (1, 2, "bf16", {"device": "cpu", "ratio": 0.5})],
)
def test_a_save_has_the_bytes_of_one_at_once_and_a_restart_has_the_last_copies(
    tmp_path, world_size, stage, dtype, offload
):
    config = Case(stage, dtype, zero={"offload_optimizer": offload}).config()
    both = {**config, "memory_checkpoint": {"path": str(tmp_path / "memory")}}
    assert simulate(_restart, world_size, tmp_path, both)[0][0] == 0
    found = simulate(_restart, world_size, tmp_path, both)
    expected = simulate(_straight, world_size, tmp_path, config)
    for (first, values), straight in zip(found, expected, strict=True):
        assert first == 6
        torch.testing.assert_close(values, straight, rtol=0.0, atol=0.0)
    _check_bytes(tmp_path, "manifest.json")
