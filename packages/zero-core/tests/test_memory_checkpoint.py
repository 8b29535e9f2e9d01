"""Checkpoints in memory: a restarted job loses at most the step whose copy is incomplete."""

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from support.full_disk import files_up_to

import zero_core
from zero_core import CheckpointError, ConfigError
from zero_core.checkpoint.in_memory import keeper, snapshots
from zero_core.checkpoint.in_memory.snapshots import Ring, Slot
from zero_core.step.update import updates_in_backward
from zero_core.testing import Case, assert_same, batch, make_model, on_ranks, simulate

STEPS = 5


def _build(ranks, stage, memory=None, dtype="fp32", **keys):
    top = {} if memory is None else {"memory_checkpoint": {"path": str(memory), **keys}}
    return Case(stage=stage, dtype=dtype, top=top).build(ranks)


def _run(engine, first, stop):
    for step in range(first, stop):
        engine.backward(engine(**batch(step, 0, engine.rank))["loss"])
        engine.step(client_state={"step": step + 1})
    return engine.full_state_dict()


def _start(ranks, folder, stage, stop, dtype="fp32"):
    """Train up to step ``stop`` like a restarted program. Return the first step and the values."""
    node = ranks.rank // (ranks.per_node or ranks.size)
    engine = _build(ranks, stage, folder / f"node-{node}", dtype)
    first = (engine.resume(folder / "disk") or {"step": 0})["step"]
    assert engine.global_steps == first
    values = _run(engine, first, stop)
    with engine.rewriting():  # waits until the last copy is complete
        pass
    engine.close()
    return first, values


def _tear(folder, victim):
    """Create the files of a rank that was killed while writing its third copy."""
    (marker,) = folder.glob(f"node-0/*/{3 % 2}/rank-{victim:05d}.json")
    marker.unlink()  # a rank removes its marker before it overwrites the files
    marker.with_name(f"master_weight-{victim:05d}.safetensors").write_bytes(b"torn")


_DAMAGES = {
    "nothing": (lambda folder: None, 3),
    "rank 0 in a copy": (lambda folder: _tear(folder, 0), 2),
    "rank 1 in a copy": (lambda folder: _tear(folder, 1), 2),
    "a node's memory": (lambda folder: shutil.rmtree(folder / "node-1"), 3),
}
"""What is lost after three steps: a function that deletes it, and the step to resume from."""


@pytest.mark.parametrize(
    ("lost", "stage", "dtype", "world_size"),
    [
        ("nothing", 0, "fp32", 2),
        ("nothing", 1, "bf16", 2),
        ("nothing", 2, "fp16", 2),
        ("nothing", 3, "fp32", 1),
        ("rank 0 in a copy", 3, "bf16", 2),
        ("rank 1 in a copy", 3, "fp32", 2),
        ("a node's memory", 3, "fp32", 3),
    ],
)
def test_restart_loses_at_most_the_step_of_a_torn_copy(lost, stage, dtype, world_size, tmp_path):
    damage, first = _DAMAGES[lost]
    per_node = 1 if lost == "a node's memory" else world_size
    simulate(_start, world_size, tmp_path, stage, 3, dtype, ranks_per_node=per_node)
    damage(tmp_path)
    found = simulate(_start, world_size, tmp_path, stage, STEPS, dtype, ranks_per_node=per_node)
    straight = simulate(
        lambda ranks: _run(_build(ranks, stage, dtype=dtype), 0, STEPS),
        world_size,
        ranks_per_node=per_node,
    )
    assert_same(found, [(first, values) for values in straight])
    assert not (tmp_path / "disk").exists()
    if per_node == 1 < world_size:  # the node's only rank has its own copy and its neighbour's
        assert len(list(tmp_path.glob("node-1/*/0/rank-*.json"))) == 2


def test_states_that_were_loaded_replace_the_copies(tmp_path, monkeypatch):
    commit = Slot.commit

    def commit_late(slot, rank, marker):
        time.sleep(0.1)  # keeps a copy running when the load begins
        commit(slot, rank, marker)

    monkeypatch.setattr(Slot, "commit", commit_late)

    def roll_back(ranks):
        memory = tmp_path / "memory"
        engine = _build(ranks, 3, memory, every=2)
        assert engine.resume(tmp_path / "disk") is None
        _run(engine, 0, 1)
        engine.save_checkpoint(tmp_path / "disk", client_state={"step": 1})
        _run(engine, 1, 4)
        engine.load_checkpoint(tmp_path / "disk")
        engine.close()
        again = _build(ranks, 3, memory, every=2)
        assert again.resume(tmp_path / "disk") == {"step": 1}
        _run(again, 1, 2)
        expected = again.full_state_dict()
        place = again.save_checkpoint(tmp_path / "disk", client_state={"step": 2})
        again.close()
        ranks.connect().barrier()
        for path in place.glob(f"*-{ranks.rank:05d}.safetensors"):
            path.unlink()  # the states are in memory, so resume() reads only the manifest on disk
        last = _build(ranks, 3, memory, every=2)
        assert last.resume(tmp_path / "disk") == {"step": 2}
        assert_same(last.full_state_dict(), expected)

    simulate(roll_back, 2)


def test_states_that_are_copied_beside_backward_are_not_updated_in_it():
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = {"train_batch_size": 2, "check_grad_overflow": False, "zero_optimization": zero}
    assert updates_in_backward(zero_core.load_config(config, world_size=1))
    copied = zero_core.load_config({**config, "memory_checkpoint": {}}, world_size=1)
    assert not updates_in_backward(copied)


@on_ranks(1)
def test_a_step_before_resume_and_memory_that_nothing_keeps_or_owns_are_refused(
    ranks, tmp_path, monkeypatch
):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(RuntimeError, match=r"engine\.resume\(directory\)"):
        _run(_build(ranks, 1, Path("/dev/shm/none")), 0, 1)
    engine = Case(1, top={"memory_checkpoint": {}}).build(ranks)
    with pytest.raises(ConfigError, match="no launcher"):
        engine.resume(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"memory_checkpoint\.path"):
        _build(ranks, 1, tmp_path / "file").resume(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: 1 << 20)
    with pytest.raises(CheckpointError, match="belongs to another user"):
        _build(ranks, 1, tmp_path).resume(tmp_path / "disk")


def test_keeper_removes_the_folder_once_launcher_and_ranks_have_ended(tmp_path):
    folder = tmp_path / "memory"
    folder.mkdir()
    launcher = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    rank = os.open(folder / keeper.USERS, os.O_CREAT | os.O_RDWR)
    fcntl.flock(rank, fcntl.LOCK_SH)
    arguments = [str(folder), str(launcher.pid), keeper.started_at(launcher.pid)]
    kept = subprocess.Popen([sys.executable, "-I", "-S", keeper.__file__, *arguments])
    launcher.kill()
    launcher.communicate()
    with pytest.raises(subprocess.TimeoutExpired):
        kept.wait(0.2)
    assert folder.is_dir()
    os.close(rank)
    assert kept.wait(60) == 0
    assert not folder.exists()


def test_launcher_is_found_above_a_shell_that_ends_with_the_rank(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/0/error.json")
    command, own = ["sh", "-c", "echo; read x"], dict(os.environ)
    with subprocess.Popen(command, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == b"\n"
        monkeypatch.setattr(os, "getppid", lambda: shell.pid)
        above = keeper.find_launcher()
        # A launcher may itself be started by another launcher.
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/1/error.json")
        assert keeper.find_launcher() == shell.pid
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/0/error.json")
        monkeypatch.setattr(keeper, "status", lambda process: [])
        assert keeper.find_launcher() == shell.pid
    assert above == os.getpid()


def test_second_engine_in_one_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "_WAIT_S", 0.0)

    def resume_twice(ranks):
        memory = tmp_path / "memory"
        first = _build(ranks, 1, memory)
        assert first.resume(tmp_path / "disk") is None
        second = _build(ranks, 1, memory)
        with pytest.raises(CheckpointError, match="another engine keeps copies"):
            second.resume(tmp_path / "disk")
        assert second.resume(tmp_path / "other") is None
        first.close()
        third = _build(ranks, 1, memory)
        assert third.resume(tmp_path / "disk") is None

    simulate(resume_twice, 2)


def test_full_memory_is_an_error_before_anything_is_written_there(tmp_path):
    values = {"0": torch.ones(1 << 18)}
    slot = Slot(tmp_path)
    with files_up_to(1 << 19), pytest.raises(CheckpointError, match="make the memory larger"):
        slot.write("master_weight-00000.safetensors", values)
    assert slot.write("master_weight-00000.safetensors", values) > 1 << 20


@on_ranks(1)
def test_copy_under_way_at_close_has_the_values_of_the_last_step(ranks, tmp_path, monkeypatch):
    write = Slot.write

    def write_late(slot, name, tensors):
        time.sleep(0.1)
        return write(slot, name, tensors)

    monkeypatch.setattr(Slot, "write", write_late)
    memory = tmp_path / "memory"
    engine = _build(ranks, 0, memory)
    engine.resume(tmp_path / "disk")
    expected = _run(engine, 0, 2)
    engine.close()
    with torch.no_grad():
        for param in engine.module.parameters():
            param.zero_()
    again = _build(ranks, 0, memory)
    assert again.resume(tmp_path / "disk") == {"step": 2}
    assert_same(again.full_state_dict(), expected)


def test_folder_is_in_use_until_the_copy_of_a_neighbour_is_written(tmp_path, monkeypatch):
    swap, gate = Ring.swap, threading.Event()

    def swap_late(ring, *args):
        assert gate.wait(120)
        swap(ring, *args)

    monkeypatch.setattr(Ring, "swap", swap_late)

    def close(ranks):
        memory = tmp_path / f"node-{ranks.rank}"
        engine = _build(ranks, 0, memory)
        engine.resume(tmp_path / "disk")
        _run(engine, 0, 1)
        engine.close()
        (lock,) = memory.glob("*/.rank-*.lock")
        with lock.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ranks.connect().barrier()
        gate.set()
        snapshots.Place(str(memory), tmp_path / "disk", ranks.rank).close()
        assert len(list(memory.glob("*/1/rank-*.json"))) == 2

    simulate(close, 2, ranks_per_node=1)


@on_ranks(1)
def test_copy_that_fails_at_once_is_not_waited_for(ranks, tmp_path, monkeypatch):
    def fail():
        raise OSError("no such limit")

    monkeypatch.setattr(snapshots, "use_one_core", fail)
    engine = _build(ranks, 0, tmp_path / "memory")
    engine.resume(tmp_path / "disk")
    _run(engine, 0, 1)
    engine.close()


def test_plan_has_the_bytes_that_the_copies_take(tmp_path):
    simulate(_start, 2, tmp_path, 2, 2, "bf16", ranks_per_node=1)
    config = {**Case(stage=2, dtype="bf16").config(), "memory_checkpoint": {}}
    planned = zero_core.plan(make_model(), config, 2, ranks_per_node=1, device_type="cpu")
    (folder,) = tmp_path.glob("node-0/*")
    names = ("master_weight", "exp_avg", "exp_avg_sq", "value")
    files = [path for path in folder.glob("*/*.safetensors") if path.name[:-18] in names]
    assert len(files) == 2 * 2 * len(names)
    headers = [8 + int.from_bytes(path.read_bytes()[:8], "little") for path in files]
    taken = sum(path.stat().st_size for path in files) - sum(headers)
    assert planned.memory.host["copies in memory"] == taken
