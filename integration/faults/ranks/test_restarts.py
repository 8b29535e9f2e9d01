"""The train program resumes by itself after a rank, a node or the launcher has died.

If the number of ranks stays the same, the result must be bit-identical to that of an undisturbed
run. The last tests have copies in memory instead of checkpoints on disk.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from faults.harness import END_S, Program, complete, is_running, last_step, ranks_leave, weights
from faults.ranks.slurm_stand_ins import slurm_job
from zero_core.checkpoint.in_memory import keeper, snapshots
from zero_engine.train.metrics import read_metrics
from zero_engine.train.run_lock import RunLock
from zero_engine.train.settings import RunFolder

STEPS = 60
OPTIONS = (
    *("--layers=2", "--width=32", "--heads=2", "--context=32", "--vocab=300"),
    *("--eval-every=20", "--eval-windows=16", "--save-every=10"),
)
TORCHRUN = ("-m", "torch.distributed.run")
# Late nodes would wait for a shared store's address, which torch 2.13 does not publish again.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
ONE_NODE = (*TORCHRUN, "--standalone", "--nproc-per-node=2")


def program(folder: RunFolder, *options: str, steps: int = STEPS) -> tuple[str, ...]:
    own = (f"--steps={steps}", f"--output={folder.root}", *options)
    return ("-m", "zero_engine", "train", *OPTIONS, *own)


def num_ranks(folder: RunFolder) -> list[int]:
    """Return the number of ranks at each logged step, or [0] without a log."""
    if not folder.metrics.exists():
        return [0]
    return [len(e["memory_bytes"]) for e in read_metrics(folder.metrics) if "loss" in e] or [0]


def steps_of(folder: RunFolder) -> list[int]:
    return [int(e["step"]) for e in read_metrics(folder.metrics) if "loss" in e]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = RunFolder(tmp_path_factory.mktemp("straight"))
    complete(*ONE_NODE, *program(folder))
    return folder


@pytest.mark.parametrize(("flag", "victim"), [("", 0), ("--overwrite", 1), ("--resume=auto", 1)])
def test_killed_rank_is_started_anew_and_the_run_ends_with_the_same_bits(
    victim: int, flag: str, straight: RunFolder, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    flags = [flag] if flag else []
    with Program(*ONE_NODE, "--max-restarts=2", *program(folder, *flags)) as run:
        for after in (15, 35):
            run.wait_for(lambda step=after: last_step(folder) >= step)
            killed = run.ranks()
            os.kill(killed[victim], signal.SIGKILL)
            run.wait_for(lambda gone=killed: not set(run.ranks()) & set(gone))
        assert run.end() == 0, run.output
    assert weights(folder) == weights(straight)
    assert steps_of(folder) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_run_that_is_told_to_stop_saves_and_goes_on(signum, straight, tmp_path):
    folder = RunFolder(tmp_path / "run")
    command = ("-m", "zero_engine", *program(folder)[2:], "--ranks=2")
    with Program(*command) as run:
        run.wait_for(lambda: last_step(folder) >= 15)
        os.kill(run.pid, signum)
        assert run.end() == 128 + signum, run.output
        assert f"stopped by {signum.name}, checkpoint saved" in run.output
        assert "Traceback" not in run.output
    assert last_step(folder) < STEPS
    complete(*ONE_NODE, *program(folder, "--resume"))
    assert weights(folder) == weights(straight)


def test_slurm_job_saves_before_its_end_and_goes_on_when_it_is_requeued(straight, tmp_path):
    folder, heartbeat = RunFolder(tmp_path / "run"), tmp_path / "heartbeat"
    variables = slurm_job(tmp_path, f'#!/bin/bash\nexec {sys.executable} -m zero_engine "$@"\n')
    become = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
    job = ("-c", become, str(tmp_path / "job.sh"), *program(folder, "--resume=auto"))
    with Program(*job, **{**variables, "ZERO_HEARTBEAT_FILE": str(heartbeat)}) as run:
        run.wait_for(lambda: last_step(folder) >= 15)
        os.kill(run.pid, signal.SIGUSR1)
        assert run.end() == 128 + signal.SIGUSR1, run.output
        assert "stopped by SIGUSR1, checkpoint saved" in run.output
    assert (tmp_path / "requeued").exists()
    assert 0 < json.loads(heartbeat.read_text())["step"] <= last_step(folder) < STEPS
    complete(*job, **variables)
    assert weights(folder) == weights(straight)


def test_ranks_of_a_killed_launcher_save_and_leave_and_the_run_goes_on(straight, tmp_path):
    folder = RunFolder(tmp_path / "run")
    with Program(*ONE_NODE, *program(folder)) as run:
        run.wait_for(lambda: last_step(folder) >= 15)
        ranks = run.ranks()
        run.kill()
    assert len(ranks) == 2
    assert ranks_leave(ranks), "ranks without a launcher train on"
    assert last_step(folder) < STEPS
    complete(*ONE_NODE, *program(folder, "--resume=auto"))
    assert weights(folder) == weights(straight)


def node(port: int) -> tuple[str, ...]:
    """Return the interpreter's arguments that start one node of a job of one or two nodes."""
    return (
        *TORCHRUN,
        *("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--local-addr=127.0.0.1"),
        *("--rdzv-backend=c10d", "--rdzv-id=elastic", f"--rdzv-endpoint=127.0.0.1:{port}"),
        "--rdzv-conf=last_call_timeout=3,join_timeout=120",
    )


def test_killed_node_leaves_the_run_to_the_other(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    command = (*node(29611), *program(folder, steps=100))
    with Program(*command, **OWN_STORE) as first:
        time.sleep(2)  # the first node must host the rendezvous
        with Program(*command, **OWN_STORE) as second:
            first.wait_for(lambda: last_step(folder) >= 15)
            assert num_ranks(folder)[-1] == 2
            second.kill_all()
        assert first.end() == 0, first.output
    assert steps_of(folder) == list(range(1, 101))
    assert num_ranks(folder)[-1] == 1


def test_node_that_comes_later_takes_part(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    command = (*node(29612), *program(folder, steps=400))
    with Program(*command, **OWN_STORE) as first:
        first.wait_for(lambda: last_step(folder) >= 15)
        assert num_ranks(folder)[-1] == 1
        with Program(*command, **OWN_STORE) as second:
            assert first.end() == 0, first.output + second.output
    assert steps_of(folder) == list(range(1, 401))
    assert num_ranks(folder)[-1] == 2


def test_ranks_of_a_launcher_that_is_killed_while_they_import_leave(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with Program(*ONE_NODE, "--max-restarts=1", *program(folder), **OWN_STORE) as run:
        run.wait_for(lambda: len(run.ranks()) == 2)
        time.sleep(1)  # by now Python has started, but torch is still being imported
        ranks = run.ranks()
        run.kill()
        assert ranks_leave(ranks)
    assert last_step(folder) < STEPS


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_start_that_waits_for_the_folder_is_told_to_stop(signum, tmp_path):
    folder = RunFolder(tmp_path / "run")
    other = RunLock(folder)
    other.acquire(wait_s=0)
    command = (*program(folder, "--resume=auto")[2:], "--ranks=2")
    with Program("-m", "zero_engine", *command) as run:
        run.wait_for(lambda: "waiting for its end" in run.output)
        ranks = run.ranks()
        os.kill(run.pid, signum)
        assert run.end() == 128 + signum, run.output
        assert ranks_leave(ranks)
    other.release()


STALE_VIEW = """
import os, sys
from zero_engine.train.program import train
from zero_engine.train.options import Start
sizes = {"layers": 1, "width": 32, "heads": 2, "context": 32, "vocab": 300, "eval_windows": 8}
folder, steps = sys.argv[1] + os.environ["RANK"], int(sys.argv[2])
sys.exit(train({**sizes, "output": folder, "steps": steps}, Start.OVERWRITE))
"""


def test_ranks_that_see_the_folder_of_before_take_the_settings_of_the_first(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "run-"
    script.write_text(STALE_VIEW)
    # An earlier run has left a folder on each of the two machines.
    for number, steps in (("1", 3), ("0", 3)):
        complete(str(script), str(folder), str(steps), RANK=number)
    complete(*ONE_NODE, str(script), str(folder), "5")
    assert steps_of(RunFolder(tmp_path / "run-0")) == [1, 2, 3, 4, 5]


COPIED_STEPS = 200
MEMORY = Path("/dev/shm")


def config(
    folder: Path, stage: int, device: str, *, is_copied: bool, is_invariant: bool = False
) -> str:
    path = folder / f"{stage}-{device}-{is_copied}.json"
    content: dict[str, object] = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "world_size_invariant": is_invariant,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": device}},
    }
    if is_copied:
        content["memory_checkpoint"] = {}
    path.write_text(json.dumps(content))
    return str(path)


def copied_program(folder: RunFolder, config: str) -> tuple[str, ...]:
    times = ("--eval-every=50", "--save-every=100000", "--log-every=1")
    return program(folder, *times, f"--config={config}", steps=COPIED_STEPS)


def resumed_at(*nodes: Program) -> list[int]:
    """Return the steps after which the run resumed, from rank 0's output."""
    lines = [line for node in nodes for line in node.output.splitlines()]
    return [int(line.split()[4]) for line in lines if line.startswith("goes on after step ")]


def left_in_memory() -> set[Path]:
    return set(MEMORY.glob(f"zero-core-{os.getuid()}-*"))


@contextmanager
def nothing_left_in_memory() -> Iterator[None]:
    """Check that the jobs in this context remove their data in memory.

    Data of jobs of other installations on this machine is ignored.
    """
    before = left_in_memory()
    yield
    limit = time.monotonic() + END_S
    while left := left_in_memory() - before - keepers(is_own=False).keys():
        assert time.monotonic() < limit, (left, keepers())
        time.sleep(0.1)


@pytest.mark.parametrize(("stage", "device"), [(3, "none"), (2, "cpu"), (0, "none")])
def test_killed_ranks_lose_at_most_one_step(stage: int, device: str, tmp_path: Path) -> None:
    straight, folder = RunFolder(tmp_path / "straight"), RunFolder(tmp_path / "run")
    plain = config(tmp_path, stage, device, is_copied=False)
    complete(*ONE_NODE, *copied_program(straight, plain))
    moments = random.Random(stage)
    copied = config(tmp_path, stage, device, is_copied=True)
    with (
        nothing_left_in_memory(),
        Program(*ONE_NODE, "--max-restarts=3", *copied_program(folder, copied)) as run,
    ):
        reached = []
        # Steps instead of seconds, because a fast machine takes all steps in a second.
        for first in (10, 60, 110):
            after = first + moments.randrange(40)
            run.wait_for(lambda step=after: last_step(folder) >= step)
            killed = run.ranks()
            os.kill(killed[moments.randrange(2)], signal.SIGKILL)
            run.wait_for(lambda gone=killed: not any(map(is_running, gone)))
            reached.append(last_step(folder))
            assert not folder.has_checkpoint
        assert run.end() == 0, run.output
        resumed = resumed_at(run)
    assert len(resumed) == 3
    assert all(step - 1 <= again <= step + 1 for step, again in zip(reached, resumed, strict=True))
    assert steps_of(folder) == list(range(1, COPIED_STEPS + 1))
    assert weights(folder) == weights(straight)


def keepers(*, is_own: bool = True) -> dict[Path, int]:
    """Return the keeper processes of this machine's jobs, by their folder in memory.

    Without ``is_own`` they are those of jobs that run another installation.
    """
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # the process has ended
            continue
        programs = [a for a in arguments if a.endswith("/in_memory/keeper.py")]
        if programs and (programs[0] == keeper.__file__) == is_own:
            found[Path(arguments[arguments.index(programs[0]) + 1])] = int(path.parent.name)
    return found


def test_node_that_is_lost_with_its_memory_comes_back_from_the_other_one(tmp_path: Path) -> None:
    straight, folder = RunFolder(tmp_path / "straight"), RunFolder(tmp_path / "run")
    plain = config(tmp_path, 3, "none", is_copied=False, is_invariant=True)
    complete(*ONE_NODE, *copied_program(straight, plain))
    copied = config(tmp_path, 3, "none", is_copied=True, is_invariant=True)
    command = (*node(29613), *copied_program(folder, copied))
    with nothing_left_in_memory(), Program(*command, **OWN_STORE) as first:
        first.wait_for(lambda: bool(first.ranks()))  # the first node hosts the rendezvous
        with Program(*command, **OWN_STORE) as second, Program(*command, **OWN_STORE) as third:
            first.wait_for(lambda: num_ranks(folder)[-1] == 2)
            first.wait_for(lambda: last_step(folder) >= 20)
            # The two nodes that joined first train. The third waits until one of them is missing.
            assert sum(bool(p.ranks()) for p in (first, second, third)) == 2
            lost = second if second.ranks() else third
            left = (first, third if lost is second else second)
            ranks = lost.ranks()
            of_lost = snapshots.root_of(lost.pid, keeper.started_at(lost.pid))
            os.kill(keepers()[of_lost], signal.SIGKILL)
            lost.kill_all()
            first.wait_for(lambda: not any(map(is_running, ranks)))
            reached, num_before = last_step(folder), len(resumed_at(*left))
            shutil.rmtree(of_lost)
            first.wait_for(lambda: len(resumed_at(*left)) > num_before)
            assert not folder.has_checkpoint
            for program_left in left:
                assert program_left.end() == 0, program_left.output
            again = resumed_at(*left)[num_before]
    assert num_ranks(folder)[-1] == 2
    assert reached - 1 <= again <= reached + 1
    assert steps_of(folder) == list(range(1, COPIED_STEPS + 1))
    assert weights(folder) == weights(straight)
