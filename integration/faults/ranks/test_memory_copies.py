"""Killed ranks resume from copies in memory, without a checkpoint on disk.

The runs save no checkpoint before their end. Their results must be bit-identical to those of an
undisturbed run.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from faults.harness import END_S, Program, is_running
from faults.ranks import test_restarts
from faults.ranks.test_restarts import (
    ONE_NODE,
    OWN_STORE,
    last_step,
    node,
    num_ranks,
    steps_of,
    weights,
)
from zero_core.checkpoint.in_memory import keeper, snapshots
from zero_engine.train.settings import RunFolder

STEPS = 200
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


def program(folder: RunFolder, config: str) -> tuple[str, ...]:
    times = ("--eval-every=50", "--save-every=100000", "--log-every=1")
    return test_restarts.program(folder, *times, f"--config={config}", steps=STEPS)


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
    with Program(*ONE_NODE, *program(straight, plain)) as run:
        assert run.end() == 0, run.output
    moments = random.Random(stage)
    copied = config(tmp_path, stage, device, is_copied=True)
    with (
        nothing_left_in_memory(),
        Program(*ONE_NODE, "--max-restarts=3", *program(folder, copied)) as run,
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
    assert steps_of(folder) == list(range(1, STEPS + 1))
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
    with Program(*ONE_NODE, *program(straight, plain)) as run:
        assert run.end() == 0, run.output
    copied = config(tmp_path, 3, "none", is_copied=True, is_invariant=True)
    command = (*node(29613), *program(folder, copied))
    with nothing_left_in_memory(), Program(*command, **OWN_STORE) as first:
        first.wait_for(lambda: bool(first.ranks()))  # the first node hosts the rendezvous
        with Program(*command, **OWN_STORE) as second, Program(*command, **OWN_STORE) as third:
            first.wait_for(lambda: num_ranks(folder)[-1] == 2)
            first.wait_for(lambda: last_step(folder) >= 20)
            # The two nodes that met first train. The third waits until one of them is missing.
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
    assert steps_of(folder) == list(range(1, STEPS + 1))
    assert weights(folder) == weights(straight)
