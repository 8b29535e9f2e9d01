"""Ranks that srun or mpirun has started are one training, not as many as there are processes."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import environment, own_lines
from ports import free_port

from benchmarks.harness.forked_python import forked_python
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
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
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


# SLURM's pmi2 plugin, MpiDefault at some sites, sets variables of MPI's, too.
PMI2 = {**SLURM, "PMI_FD": "7", "PMI_JOBID": "40007.0", "PMI_RANK": "5", "PMI_SIZE": "8"}


@pytest.mark.parametrize("environment", [SLURM, PMI2])
def test_slurms_task_is_a_rank(environment: dict[str, str]) -> None:
    assert rank_variables(environment) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "node07",
        "MASTER_PORT": "20007",
    }


def test_given_port_wins_over_the_one_of_slurms_job() -> None:
    assert rank_variables(SLURM, port=29501)["MASTER_PORT"] == "29501"
    assert rank_variables({**SLURM, "MASTER_PORT": "77"}, port=29501)["MASTER_PORT"] == "77"


def test_mpiruns_process_on_one_machine_is_a_rank() -> None:
    assert rank_variables(OPEN_MPI, port=1234) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
    }


def test_address_is_asked_for_where_mpirun_does_not_tell_it() -> None:
    with pytest.raises(ConfigError, match=r"mpirun started 4 ranks.*set MASTER_ADDR to the addr"):
        rank_variables(MPICH)
    found = rank_variables({**MPICH, "MASTER_ADDR": "host1", "MASTER_PORT": "77"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("host1", "77")
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("1", "4", "1")


def test_rank_within_the_machine_is_asked_for_where_it_is_not_told() -> None:
    with pytest.raises(ConfigError, match="set LOCAL_RANK"):
        rank_variables({"PMI_RANK": "1", "PMI_SIZE": "4", "MASTER_ADDR": "host1"})


@pytest.mark.parametrize("of_mpi", [{"PMI_SIZE": "16"}, {"PMI_RANK": "6"}])
def test_slurm_is_not_asked_where_mpiruns_proxies_are_its_tasks(of_mpi: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="set LOCAL_RANK"):
        rank_variables({**PMI2, **of_mpi})


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


def _start_both(script: Path, variables: dict[str, str], rank: str, local: str) -> list[str]:
    """``zero-engine run script`` as the two processes of a starter; the line of each."""
    port = free_port()

    def start(number: int) -> str:
        own = {rank: str(number), local: str(number), "MASTER_PORT": str(port)}
        command = [forked_python(), "-m", "zero_engine", "run", str(script)]
        more = {**environment(), **variables, **own, "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(command, env=more, capture_output=True, text=True, timeout=600)
        return "\n".join(own_lines(done.stdout))

    with ThreadPoolExecutor(2) as pool:
        return sorted(pool.map(start, range(2)))


def test_processes_of_one_starter_are_the_ranks_of_one_training(tmp_path: Path) -> None:
    # mpirun's variables are covered by rank_variables' own tests above. What follows is shared.
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    variables = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    lines = _start_both(script, variables, "SLURM_PROCID", "SLURM_LOCALID")
    assert lines == ["0 2 0 1.0", "1 2 1 1.0"]


def test_task_with_torchruns_options_starts_the_ranks_of_its_node(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'])")
    done = subprocess.run(
        [sys.executable, "-m", "zero_engine", "run", "--standalone", str(script)],
        env={**environment(), **SLURM, "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout == "0 1\n", done.stderr
