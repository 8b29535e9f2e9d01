"""The process group of ``init_distributed``: its end with the process, and its timeout."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from conftest import environment, run_forked

from benchmarks.harness.forked_python import forked_python
from tests.support.ports import free_port
from zero_core import ConfigError
from zero_engine import deepspeed
from zero_engine.launch.torchrun import local_address_only
from zero_engine.script.hook import hooked

# Without an end of its groups, torch often has a rank killed by SIGABRT.
LEAVES_WITHOUT_A_WORD = """
import sys, torch, torch.distributed as dist
import deepspeed
deepspeed.init_distributed()
groups = [dist.new_group() for _ in range(3)]
for step in range(30):
    dist.all_reduce(torch.ones(4), group=groups[step % 3])
"""
# Its threads are looked at last of all, after what ends the group: neither an optimizer, for which
# torch imports its compiler, nor something in a cycle may keep it.
LEAVES_A_CYCLE = """
import atexit, pathlib, torch, torch.distributed as dist

def look():
    for path in pathlib.Path("/proc/self/task").glob("*/comm"):
        print("thread", path.read_text().strip())

atexit.register(look)
import deepspeed
deepspeed.init_distributed()
torch.optim.SGD([torch.zeros(1, requires_grad=True)])
cycle = [dist.group.WORLD]
cycle.append(cycle)
del cycle
dist.all_reduce(torch.ones(4))
"""
ONE_DIES = """
import os, torch, torch.distributed as dist
import deepspeed
deepspeed.init_distributed()
dist.barrier()
if dist.get_rank() == 1:
    os._exit(9)
dist.all_reduce(torch.ones(4))
"""


def _script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


def _run_ranks(script: str) -> str:
    """Run two Python processes as a launcher starts ranks, and return what they print."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {**hooked(environment()), **local_address_only()}
    ranks = [
        subprocess.Popen(
            [sys.executable, script],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    output = "".join(rank.communicate(timeout=600)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], output
    return output


@pytest.mark.slow
def test_ranks_that_leave_without_a_word_end_with_code_zero(tmp_path: Path) -> None:
    _run_ranks(_script(tmp_path, LEAVES_WITHOUT_A_WORD))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_thread_of_the_group_is_left_when_the_process_ends(tmp_path: Path) -> None:
    output = _run_ranks(_script(tmp_path, LEAVES_A_CYCLE))
    assert output.count("thread python") == 2
    assert "runloop" not in output


def test_rank_that_dies_does_not_keep_the_others_from_ending(tmp_path: Path) -> None:
    script = _script(tmp_path, ONE_DIES)
    ranks = {"PYTHON_EXEC": forked_python()}
    done = run_forked("run", "--nproc-per-node=2", script, more=ranks)
    assert done.returncode in (1, 9), done.stderr


def test_timeout_is_the_environments_in_minutes_and_must_be_a_number(monkeypatch):
    made: list[dict[str, object]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_args, **options: made.append(options))
    # Engines of other tests of this process may have left one.
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="DEEPSPEED_TIMEOUT = 'soon'"):
        deepspeed.init_distributed()
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "7")
    deepspeed.init_distributed()
    deepspeed.init_distributed(timeout=timedelta(seconds=5))
    monkeypatch.delenv("DEEPSPEED_TIMEOUT")
    deepspeed.init_distributed()
    found = [options.get("timeout") for options in made]
    assert found == [timedelta(minutes=7), timedelta(seconds=5), None]
