"""Runs that save when they are stopped. Resumed ones have the results of uninterrupted ones."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import STEPS, TIME_LIMIT_S, environment, refusal_of, run_program, train_forked
from torch._C._distributed_c10d import HashStore
from torch.distributed import destroy_process_group, init_process_group

from benchmarks.harness.forked_python import forked_python
from zero_core.checkpoint import LATEST
from zero_core.errors import ConfigError
from zero_engine.launch.ranks import agree_on_prefix
from zero_engine.train.launch import check_request, default_ranks
from zero_engine.train.metrics import read_metrics
from zero_engine.train.options import Start
from zero_engine.train.run_lock import RunLock, belongs_to, launch_numbers, note_launch
from zero_engine.train.settings import RunFolder, read_resolved

TIMING = {"tokens_per_s", "memory_bytes"}


def _numbers(folder: RunFolder) -> list[dict[str, object]]:
    """Return the log without the values that depend on timing."""
    entries = read_metrics(folder.metrics)
    return [{k: v for k, v in entry.items() if k not in TIMING} for entry in entries]


def _train_until_stopped(folder: RunFolder, *arguments: str) -> None:
    python = forked_python()
    program = subprocess.Popen(
        [python, "-m", "zero_engine", "train", *arguments, f"--output={folder.root}"],
        env={**environment(), "PYTHON_EXEC": python},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    limit = time.monotonic() + TIME_LIMIT_S
    while not folder.metrics.exists() or len(_numbers(folder)) < 3:
        assert program.poll() is None, program.communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.02)
    program.send_signal(signal.SIGTERM)
    output, _ = program.communicate(timeout=TIME_LIMIT_S)
    assert program.returncode == 128 + signal.SIGTERM, output
    assert "stopped by SIGTERM, checkpoint saved" in output
    assert "Traceback" not in output
    assert "warning" not in output.lower()


def test_run_that_was_stopped_and_resumed_is_one_without_a_stop(
    tmp_path: Path, tiny_options: tuple[str, ...], finished_run: tuple[RunFolder, str]
) -> None:
    """SIGTERM stops the run. `faults/ranks/test_restarts.py` tests other signals too."""
    folder, straight = RunFolder(tmp_path / "interrupted"), finished_run[0]
    _train_until_stopped(folder, *tiny_options)
    assert _numbers(folder)[-1]["step"] != STEPS, "the signal came too late"
    (folder.checkpoint / LATEST).unlink()  # as after a kill in the first save
    train_forked("--resume=auto", f"--output={folder.root}")
    assert len(_numbers(straight)) == STEPS + 4  # steps, and evaluations at 0, 20, 40, 60
    assert _numbers(folder) == _numbers(straight)
    weights = [(run.hf / "model.safetensors").read_bytes() for run in (folder, straight)]
    assert weights[0] == weights[1]
    assert folder.sample.read_text() == straight.sample.read_text()


def test_resumed_run_has_as_many_ranks_as_before_and_no_other_settings(
    tmp_path: Path, finished_run: tuple[RunFolder, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(shutil.copytree(finished_run[0].root, tmp_path / "copy"))
    before, last = read_resolved(folder)["world_size"], STEPS + 1
    asked = {"output": str(folder.root), "steps": last}
    with pytest.raises(ConfigError, match="--seed 7 contradicts the run, which has 0"):
        check_request({**asked, "seed": 7}, Start.RESUME, None)
    with pytest.raises(ConfigError, match="holds a run already"):
        check_request(asked, Start.NEW, None)
    assert check_request(asked, Start.RESUME, 1) == 1
    assert f"the run had {before} ranks and goes on with 1" in capsys.readouterr().err
    train_forked("--resume", f"--steps={last}", f"--output={folder.root}", ranks=1)
    assert read_resolved(folder)["world_size"] == 1 != default_ranks()
    assert read_resolved(folder)["run"]["steps"] == _numbers(folder)[-1]["step"] == last
    assert _numbers(folder)[:-2] == _numbers(finished_run[0])
    assert check_request({**asked, "steps": last + 1}, Start.RESUME, None) == 1
    assert "goes on with" not in capsys.readouterr().err


@pytest.mark.slow
def test_fewer_steps_than_were_taken_are_refused(finished_run: tuple[RunFolder, str]) -> None:
    folder, _ = finished_run
    before = folder.resolved_config.read_text()
    done = run_program("train", "--resume", f"--output={folder.root}")
    assert done.stdout.startswith(f"all {STEPS} steps were taken before")
    assert "starting" not in done.stderr
    said = refusal_of("train", "--resume", "--steps=5", f"--output={folder.root}")
    assert f"--steps 5: the run has taken {STEPS} already" in said
    assert folder.resolved_config.read_text() == before


def test_ranks_that_torchrun_starts_anew_are_of_the_launch_that_began_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    assert launch_numbers(torch.device("cpu")) == []  # without torchrun, ranks are not restarted
    note_launch(folder, [])
    assert not belongs_to(folder, [])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        (own,) = launch_numbers(torch.device("cpu"))
    finally:
        destroy_process_group()
    note_launch(folder, [own, 7])
    assert belongs_to(folder, [own])  # one node has left
    assert belongs_to(folder, [own, 8])  # a new node has joined
    assert not belongs_to(folder, [8])


def test_a_folder_in_which_a_program_trains_is_refused_to_others(tmp_path: Path) -> None:
    lock, other = (RunLock(RunFolder(tmp_path)) for _ in range(2))
    lock.acquire(wait_s=0)
    with pytest.raises(ConfigError, match=rf"trains in this folder \(process {os.getpid()} on"):
        other.acquire(wait_s=0.01)
    lock.release()
    other.acquire(wait_s=0)
    other.release()


def test_a_lock_that_outlives_its_program_is_named(tmp_path, monkeypatch, capsys):
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)  # Lustre raises this error unless mounted with flock
    folder = RunFolder(tmp_path)
    lock, other = (RunLock(folder) for _ in range(2))
    lock.acquire(wait_s=0)
    advice = f"stays until {folder.lock} is removed"
    assert advice in capsys.readouterr().err
    with pytest.raises(ConfigError, match=re.escape(advice)):
        other.acquire(wait_s=0.01)
    lock.release()


def test_checkpoints_at_a_url_outlive_the_machine(tmp_path, tiny_options):
    """The second machine has checkpoints and options, but no folder of the run."""
    store = tmp_path / "store"
    url = f"dir://run::file://{store}"
    folders = [RunFolder(tmp_path / name) for name in ("first", "other")]
    assert check_request({"output": str(folders[0].root)}, Start.AUTO, 1) == 1
    options = (*tiny_options, "--steps=4", "--save-every=2", "--eval-every=4", "--resume=auto")
    for folder in folders:
        train_forked(*options, f"--checkpoints={url}", f"--output={folder.root}", ranks=1)
        assert not (folder.root / "checkpoint").exists()
        (store / "run" / "latest").write_text("step-2")  # simulates a lost machine
    steps = [[entry["step"] for entry in _numbers(f) if "loss" in entry] for f in folders]
    assert steps == [[1, 2, 3, 4], [3, 4]]
    first, other = ((f.hf / "model.safetensors").read_bytes() for f in folders)
    assert first == other
    asked = {"output": str(tmp_path / "third"), "checkpoints": url}
    with pytest.raises(ConfigError, match=r"--checkpoints dir://run.* holds a run already"):
        check_request(asked, Start.NEW, 1)
    with pytest.raises(ConfigError, match="contradicts the run"):
        check_request({**asked, "output": str(folders[0].root), "seed": 5}, Start.RESUME, None)


def test_a_rank_ends_when_its_launcher_is_gone() -> None:
    rank = """
import time
from zero_engine.launch.started_ranks import end_with_launcher
end_with_launcher()
print("watches", flush=True)
time.sleep(600)
"""
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    variables = {**os.environ, "TORCHELASTIC_RUN_ID": "none"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", launcher], env=variables, **pipes) as program:
        assert program.stdout
        assert program.stderr
        assert program.stdout.readline() == "watches\n"
        program.kill()
        # The rank holds the pipe too, so the pipe closes when the rank has ended.
        assert f"the launcher (process {program.pid}) is gone" in program.stderr.read()


def test_ranks_that_start_again_agree_on_a_store_without_entries_of_before() -> None:
    store = HashStore()

    def start(num_ranks: int) -> str:
        with ThreadPoolExecutor(num_ranks) as pool:
            ranks = reversed(range(num_ranks))
            found = pool.map(lambda rank: agree_on_prefix(store, rank, num_ranks), ranks)
            (prefix,) = set(found)
        return prefix

    starts = [start(num_ranks) for num_ranks in (3, 3, 1, 2)]
    assert len(set(starts)) == 4
