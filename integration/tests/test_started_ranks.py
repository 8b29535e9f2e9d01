"""Ranks that srun or mpirun has started, which form one training."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import command, environment, own_lines

from benchmarks.harness.forked_python import forked_python
from tests.support.ports import free_port
from zero_core.errors import ConfigError
from zero_engine.launch.ranks import join_ranks
from zero_engine.launch.started_ranks import first_host, rank_variables

SLURM = {
    "SLURM_JOB_ID": "40007",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[07-09],login",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
# SLURM's pmi2 plugin, MpiDefault at some sites, sets variables of MPI's, too.
PMI2 = {**SLURM, "PMI_FD": "7", "PMI_JOBID": "40007.0", "PMI_RANK": "5", "PMI_SIZE": "8"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}RANK": "3" for name in ("", "LOCAL_")}
OPEN_MPI |= {f"OMPI_COMM_WORLD_{name}SIZE": "4" for name in ("", "LOCAL_")}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SCRIPT = """
import os, sys, torch, torch.distributed as dist
import deepspeed
deepspeed.init_distributed()
total = torch.tensor(float(dist.get_rank()))
dist.all_reduce(total)
line = f"{dist.get_rank()} {dist.get_world_size()} {os.environ['LOCAL_RANK']} {total}"
sys.stdout.write(line + chr(10))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("environment", [SLURM, PMI2])
def test_slurms_task_is_a_rank(environment: dict[str, str]) -> None:
    ranks = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    address = {"MASTER_ADDR": "node07", "MASTER_PORT": "20007"}
    assert rank_variables(environment) == ranks | address


def test_given_port_wins_over_the_one_of_slurms_job() -> None:
    assert rank_variables(SLURM, port=29501)["MASTER_PORT"] == "29501"
    assert rank_variables({**SLURM, "MASTER_PORT": "77"}, port=29501)["MASTER_PORT"] == "77"


def test_mpiruns_process_on_one_machine_is_a_rank() -> None:
    ranks = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
    assert rank_variables(OPEN_MPI, port=1234) == ranks | address
    found = rank_variables({**MPICH, "MASTER_ADDR": "host1", "MASTER_PORT": "77"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("host1", "77")
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("1", "4", "1")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (MPICH, r"mpirun started 4 ranks.*set MASTER_ADDR to the addr"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "MASTER_ADDR": "host1"}, "set LOCAL_RANK"),
        # SLURM is not asked where its tasks are mpirun's proxies.
        ({**PMI2, "PMI_SIZE": "16"}, "set LOCAL_RANK"),
        ({**PMI2, "PMI_RANK": "6"}, "set LOCAL_RANK"),
    ],
)
def test_what_mpirun_does_not_say_is_asked_for(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rank_variables(variables)


def test_only_gpu_that_a_rank_sees_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for visible, index in ((1, 0), (8, 3)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda visible=visible: visible)
        assert join_ranks() == chosen.pop() == torch.device("cuda", index)


@pytest.mark.parametrize(
    "alone",
    [
        {},
        {**SLURM, "RANK": "0"},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
        {name: value for name, value in SLURM.items() if "STEP" not in name},  # a batch script
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"},  # the shell of salloc
    ],
)
def test_process_that_is_no_task_has_no_variables(alone: dict[str, str]) -> None:
    assert rank_variables(alone) == {}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("a,b", "a"),
        ("node[07-09,12]", "node07"),
        ("node[3,5],x", "node3"),
        ("rack[1-2]node[4-5].lan", "rack1node4.lan"),
        ("", ""),
    ],
)
def test_first_host_of_slurms_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_processes_of_one_starter_are_the_ranks_of_one_training(tmp_path: Path) -> None:
    # mpirun's variables are covered by rank_variables' own tests above. What follows is shared.
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    variables = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    variables |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}

    def start(number: int) -> str:
        own = {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}
        words = [forked_python(), "-m", "zero_engine", "run", str(script)]
        more = {**environment(), **variables, **own}
        done = subprocess.run(words, env=more, capture_output=True, text=True, timeout=600)
        return "\n".join(own_lines(done.stdout))

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(start, range(2))) == ["0 2 0 1.0", "1 2 1 1.0"]


@pytest.mark.slow  # a whole start of torchrun
def test_task_with_torchruns_options_starts_the_ranks_of_its_node(tmp_path: Path) -> None:
    """A terminal shows a line before torch is imported, which the ranks' output replaces."""
    script = tmp_path / "script.py"
    script.write_text("import os\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'])")
    first, second = pty.openpty()
    program = subprocess.Popen(
        command("run", "--standalone", str(script)),
        stdout=second,
        stderr=second,
        env={**environment(), **SLURM, "TERM": "xterm", "COLUMNS": "80"},
    )
    os.close(second)
    shown = b""
    with contextlib.suppress(OSError):  # Linux: the end of a terminal
        while text := os.read(first, 4096):
            shown += text
    os.close(first)
    assert program.wait(60) == 0, shown
    before, _, after = shown.partition(b"0 1\r\n")
    assert b"starting" in before, shown
    assert b"starting" not in after, "it is removed"
