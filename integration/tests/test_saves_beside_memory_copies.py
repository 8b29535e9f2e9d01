"""Saves beside training while copies in memory are made after every step."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_core
from zero_core.sharded import snapshot
from zero_core.testing import Case, GatedRanks, SimulatedRanks, batch, make_model, simulate


def _train(engine: zero_core.Engine, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(**batch(step, 0, engine.rank))["loss"])
        engine.step(client_state={"step": step + 1})


def _run(
    ranks: SimulatedRanks, folder: Path, config: dict[str, Any]
) -> tuple[int, dict[str, torch.Tensor]]:
    """Train with both, as a program that is started anew after step 6 does."""
    gated = GatedRanks(**vars(ranks))
    engine = zero_core.build(make_model(), config, process_group=gated)
    first = (engine.resume(folder / "disk") or {"step": 0})["step"]
    if not first:
        _train(engine, 0, 3)
        pending = engine.async_save(folder / "disk")
        _train(engine, 3, 5)  # nothing is written yet: steps and copies overtake the save
        threading.Timer(0.01, gated.gate.set).start()
        _train(engine, 5, 6)
        pending.result()
    else:
        gated.gate.set()
        again = engine.async_save(folder / "disk")
        _train(engine, first, first + 2)
        again.result()
    values = engine.full_state_dict()
    with engine.rewriting():  # the last copy is whole
        pass
    engine.close()
    return first, values


def _straight(ranks: SimulatedRanks, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    engine = zero_core.build(make_model(), config, process_group=ranks)
    for first, last in ((0, 3), (3, 6), (6, 8)):
        _train(engine, first, last)
        engine.save_checkpoint(folder / "at-once")
    return engine.full_state_dict()


@pytest.mark.parametrize(
    ("world_size", "stage", "dtype", "offload"),
    [
        (2, 3, "fp32", {}),
        (1, 2, "bf16", {"device": "cpu", "ratio": 0.5}),
    ],
)
def test_a_save_has_the_bytes_of_one_at_once_and_a_restart_has_the_last_copies(
    tmp_path, monkeypatch, world_size, stage, dtype, offload
):
    monkeypatch.setattr(snapshot, "BLOCK_NUMEL", 61)
    config = Case(stage=stage, dtype=dtype, zero={"offload_optimizer": offload}).config()
    both = {**config, "memory_checkpoint": {"path": str(tmp_path / "memory")}}
    assert simulate(_run, world_size, tmp_path, both)[0][0] == 0
    found = simulate(_run, world_size, tmp_path, both)
    expected = simulate(_straight, world_size, tmp_path, config)
    for (first, values), straight in zip(found, expected, strict=True):
        assert first == 6
        assert all(torch.equal(values[name], value) for name, value in straight.items())
    for tag in ("step-3", "step-6"):
        for file in sorted((tmp_path / "at-once" / tag).iterdir()):
            written = (tmp_path / "disk" / tag / file.name).read_bytes()
            assert file.name == "manifest.json" or written == file.read_bytes(), file
