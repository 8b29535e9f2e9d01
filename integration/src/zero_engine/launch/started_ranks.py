"""Ranks that srun or mpirun has started, and ranks whose launcher has died.

`rank_variables` derives torchrun's variables from these:

    starter                rank, number of ranks                     local rank
    Open MPI's mpirun      OMPI_COMM_WORLD_RANK, _SIZE               OMPI_COMM_WORLD_LOCAL_RANK
    MPICH, Intel MPI       PMI_RANK, PMI_SIZE                        MPI_LOCALRANKID
    Cray's mpiexec         PMI_RANK, PMI_SIZE                        PMI_LOCAL_RANK
    SLURM's srun           SLURM_PROCID, SLURM_STEP_NUM_TASKS        SLURM_LOCALID

The script of a batch job has SLURM's variables, too, but srun has not started it. SLURM's plugin
pmi2 also sets PMI_RANK and PMI_SIZE, without a local rank. SLURM's variables are then used if they
have the same rank and number of ranks. The two sets differ if mpirun started its proxies by srun.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Mapping
from typing import NamedTuple

from zero_core.errors import ConfigError

_INTERVAL_S = 1.0
GRACE_PERIOD_S = 300
"""Seconds that a rank may take to save before it is killed."""
_watches: list[threading.Thread] = []
PORT = 29500
"""Port of rank 0 by default, as in torch."""
LOOPBACK = "127.0.0.1"


class _Starter(NamedTuple):
    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


MPI = (
    _Starter(
        "mpirun", *(f"OMPI_COMM_WORLD_{n}" for n in ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"])
    ),
    _Starter("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Starter("mpiexec", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
SLURM = _Starter("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS")
"""Variables that srun sets, and that the script of a batch job lacks."""


def rank_variables(environment: Mapping[str, str], *, port: int = PORT) -> dict[str, str]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT of this process.

    Variables that ``environment`` has keep their value. The result is empty if RANK is set, or if
    neither srun nor mpirun started several processes. ``port`` is rank 0's. With SLURM, the default
    `PORT` is replaced by a port that the job's number determines: jobs may share a machine.

    Raises:
        ConfigError: a variable is unknown, such as MASTER_ADDR without SLURM's list of nodes.
    """
    starter = _starter(environment)
    if starter is None or "RANK" in environment:
        return {}
    job = environment.get("SLURM_JOB_ID", "")
    if port == PORT and starter is SLURM and job.isdecimal():
        port = 20000 + int(job) % 20000
    found = {
        "RANK": environment[starter.rank],
        "WORLD_SIZE": _size(environment, starter),
        "LOCAL_RANK": environment.get(starter.local_rank, ""),
        "MASTER_ADDR": _address(environment, starter),
        "MASTER_PORT": str(port),
    }
    variables = {name: environment.get(name) or value for name, value in found.items()}
    for name, value in variables.items():
        if not value:
            raise ConfigError(
                f"{starter.name} started {variables['WORLD_SIZE']} ranks, but {name} can't be told "
                f"from its variables: set {name}"
                + (" to the address of rank 0's machine" if name == "MASTER_ADDR" else "")
            )
    return variables


def device_index(environment: Mapping[str, str], *, num_visible: int) -> int | None:
    """Return LOCAL_RANK, or 0 if one device is visible. Returns None if LOCAL_RANK is not set."""
    local_rank = environment.get("LOCAL_RANK")
    if local_rank is None:
        return None
    return 0 if num_visible == 1 else int(local_rank)


def first_host(nodes: str) -> str:
    """Return the first host of SLURM's list: node07 of ``"node[07-9,12],login1"``."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes)
    assert first is not None, "the expression matches the empty text"
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group())


def _starter(environment: Mapping[str, str]) -> _Starter | None:
    found = [starter for starter in (*MPI, SLURM) if _has_started(environment, starter)]
    told = [(environment[starter.rank], _size(environment, starter)) for starter in found]
    whole = [
        starter
        for starter, its in zip(found, told, strict=True)
        if its == told[0] and starter.local_rank in environment
    ]
    return next(iter(whole + found), None)


def _has_started(environment: Mapping[str, str], starter: _Starter) -> bool:
    if starter is SLURM and "SLURM_JOB_ID" in environment and environment.keys().isdisjoint(STEP):
        return False  # the script of a batch job
    return starter.rank in environment and int(_size(environment, starter) or "1") > 1


def _size(environment: Mapping[str, str], starter: _Starter) -> str:
    size = environment.get(starter.size, "")
    return size or (environment.get("SLURM_NTASKS", "") if starter is SLURM else "")


def _address(environment: Mapping[str, str], starter: _Starter) -> str:
    if starter is not SLURM:
        is_one_machine = environment.get(starter.local_size) == environment[starter.size]
        return LOOPBACK if is_one_machine else ""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    is_one_machine = environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES")) == "1"
    return LOOPBACK if is_one_machine else first_host(nodes)


def end_with_launcher() -> None:
    """Start a thread that sends SIGTERM to this process when its launcher has ended.

    If torchrun itself is killed, its ranks would train on, next to the ranks that replace them.

    A program that handles SIGTERM has `GRACE_PERIOD_S` seconds. Does nothing without torchrun, or
    if the process watches its launcher already.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or _watches:
        return
    # A daemon thread does not delay the end of the process.
    watch = threading.Thread(
        target=_watch, args=(os.getppid(),), name="zero_engine launcher", daemon=True
    )
    _watches.append(watch)
    watch.start()


def _watch(launcher: int) -> None:
    waiting = threading.Event()  # never set: its timeout is an interruptible sleep
    while os.getppid() == launcher:
        waiting.wait(_INTERVAL_S)
    print(
        f"rank {os.environ.get('RANK', '0')}: the launcher (process {launcher}) is gone: this rank "
        "ends, too",
        file=sys.stderr,
        flush=True,
    )
    os.kill(os.getpid(), signal.SIGTERM)
    waiting.wait(GRACE_PERIOD_S)
    # The main thread may hang in a collective with a rank that has ended, and never handle SIGTERM.
    os._exit(128 + signal.SIGTERM)
