"""Saves beside training: what they hold, what happens meanwhile, and how they fail."""

from __future__ import annotations

import resource
import shutil
import threading
from pathlib import Path

import pytest
import torch

import zero_core
from zero_core import CheckpointError
from zero_core.comm.topology import Ranks
from zero_core.sharded import snapshot
from zero_core.testing import (
    Case,
    GatedRanks,
    SimulatedRanks,
    batch,
    make_model,
    run_on_processes,
    simulate,
)


def _train(engine: zero_core.Engine, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(**batch(step, 0, engine.rank))["loss"])
        engine.step()


def _build(ranks: SimulatedRanks, stage: int, **keys: object) -> zero_core.Engine:
    config = {**Case(stage=stage).config(), **keys}
    return zero_core.build(make_model(), config, process_group=ranks)


def _gated(ranks: SimulatedRanks) -> GatedRanks:
    return GatedRanks(**vars(ranks))


def _save_beside(ranks: SimulatedRanks, folder: Path, stage: int, keys: dict[str, object]) -> None:
    gated = _gated(ranks)
    engine = _build(gated, stage, **keys)
    _train(engine, 0, 3)
    pending = engine.async_save(folder / "beside", client_state={"epoch": 7})
    _train(engine, 3, 5)  # nothing is written yet: every state is overtaken
    assert not pending.done()
    gated.gate.set()
    assert pending.result() == folder / "beside" / "step-3"
    engine.close()
    straight = _build(ranks, stage, **keys)
    _train(straight, 0, 3)
    straight.save_checkpoint(folder / "at-once", client_state={"epoch": 7})
    straight.close()


_MOMENTUM = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}
_WHOLE = {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}}


@pytest.mark.parametrize(
    ("stage", "world_size", "keys"),
    [
        (0, 2, {}),
        (1, 3, {"bf16": {"enabled": True}}),
        (2, 2, _MOMENTUM),
        (3, 1, {}),
        (3, 3, {}),
        (3, 2, _WHOLE),
    ],
)
def test_a_save_that_training_overtakes_has_the_bytes_of_one_at_once(
    tmp_path, monkeypatch, stage, world_size, keys
):
    monkeypatch.setattr(snapshot, "BLOCK_NUMEL", 37)
    simulate(_save_beside, world_size, tmp_path, stage, keys)
    at_once = sorted((tmp_path / "at-once" / "step-3").iterdir())
    assert len(at_once) > 3
    for file in at_once:
        assert (tmp_path / "beside" / "step-3" / file.name).read_bytes() == file.read_bytes()
    assert (tmp_path / "beside" / "latest").read_text() == "step-3"


def test_a_second_save_waits_or_is_refused_and_loads_wait(tmp_path):
    def program(ranks: SimulatedRanks) -> None:
        gated = _gated(ranks)
        engine = _build(gated, 2)
        _train(engine, 0, 1)
        first = engine.async_save(tmp_path)
        with pytest.raises(CheckpointError, match="save of step-1 is under way"):
            engine.async_save(tmp_path, "other", on_pending="refuse")
        assert not first.done()
        threading.Timer(0.05, gated.gate.set).start()
        second = engine.async_save(tmp_path, "other")
        assert first.done()
        engine.load_checkpoint(tmp_path, "step-1")
        assert second.done()
        _train(engine, 1, 2)
        engine.async_save(tmp_path)
        engine.close()
        assert (tmp_path / "step-2" / "manifest.json").exists()

    simulate(program, 2)


def test_copies_are_bounded_if_asked_and_the_step_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "BLOCK_NUMEL", 64)

    def program(ranks: SimulatedRanks) -> tuple[int, int]:
        peaks = []
        for limit in (None, 1024):
            gated = _gated(ranks)
            engine = _build(gated, 1)
            pending = engine.async_save(tmp_path / str(limit), max_copy_bytes=limit)
            if limit is None:
                _train(engine, 0, 1)
            gated.gate.set()
            _train(engine, 1, 3)
            pending.result()
            peaks.append(pending.peak_bytes)
            engine.close()
        return peaks[0], peaks[1]

    ((unbounded, bounded),) = simulate(program, 1)
    assert bounded <= 1024 < unbounded


def test_what_has_not_changed_is_linked_not_written(tmp_path):
    def program(ranks: SimulatedRanks) -> None:
        engine = _build(ranks, 3)
        _train(engine, 0, 2)
        engine.save_checkpoint(tmp_path, "a")
        engine.async_save(tmp_path, "b").result()  # no step since
        _train(engine, 2, 3)
        engine.async_save(tmp_path, "c").result()  # frozen values and buffers have not changed
        with torch.no_grad():
            name = "frozen.0.up.weight"
            engine.states.set_full(name, engine.states.get_full(name) + 1.0)
        engine.save_checkpoint(tmp_path, "d")
        engine.close()

    simulate(program, 2)
    inodes = {
        tag: {file.name: file.stat().st_ino for file in (tmp_path / tag).iterdir()}
        for tag in "abcd"
    }

    def new(one: str, other: str) -> set[str]:
        files = inodes[one].keys()
        return {name.split("-")[0] for name in files if inodes[one][name] != inodes[other][name]}

    states = {"master_weight", "exp_avg", "exp_avg_sq"}
    assert new("a", "b") == {"manifest.json", "rng"}
    assert new("b", "c") == {"manifest.json", "rng", *states}
    assert new("c", "d") == {"manifest.json", "rng", "value"}
    for tag in "abc":
        shutil.rmtree(tmp_path / tag)
    simulate(lambda ranks: _build(ranks, 3).load_checkpoint(tmp_path, "d"), 1)


def test_a_full_disk_is_an_error_on_all_ranks_once_and_leaves_nothing(tmp_path):
    def program(ranks: SimulatedRanks) -> None:
        gated = _gated(ranks)
        engine = _build(gated, 3)
        _train(engine, 0, 1)
        engine.save_checkpoint(tmp_path)
        _train(engine, 1, 2)
        pending = engine.async_save(tmp_path)
        gated.gate.set()
        _train(engine, 2, 3)
        with pytest.raises(CheckpointError, match="could not be written"):
            engine.save_checkpoint(tmp_path)
        assert isinstance(pending.exception(), CheckpointError)
        engine.async_save(tmp_path)
        with pytest.raises(CheckpointError, match="could not be written"):
            engine.close()

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    simulate(lambda ranks: _build(ranks, 3).save_checkpoint(tmp_path, "kept"), 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # as a full disk
    try:
        with pytest.raises(CheckpointError):
            simulate(program, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir() if path.name != "latest"] == ["kept"]


def _run_in_process(ranks: Ranks, folder: str) -> None:
    engine = zero_core.build(make_model(), Case(stage=2).config(), process_group=ranks)
    _train(engine, 0, 1)
    for step in (1, 2):
        pending = engine.async_save(folder)
        _train(engine, step, step + 1)
    assert pending.result() == Path(folder) / "step-2"
    assert engine.load_checkpoint(folder)[0] == Path(folder) / "step-2"
    engine.async_save(folder, "last")  # and the process ends


def test_the_threads_of_processes_agree_through_the_store(tmp_path):
    run_on_processes(_run_in_process, 2, str(tmp_path))
    assert (tmp_path / "latest").read_text() == "last"
