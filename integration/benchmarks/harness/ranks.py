"""Fresh rank processes and the results that they write.

A rank process calls a function, given as ``module:function``, with its `Place` and with arguments
that were passed as JSON. `benchmarks.harness.rank` is the program of the process.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Row = dict[str, Any]
"""One result, as JSON. A row without figures has the reason as ``failure`` or ``skipped``."""

ROOT = Path(__file__).parents[2]
"""Folder of the package `benchmarks`."""
TIME_LIMIT_S = 600.0
LOG_LENGTH = 4000
"""Characters kept from the end of a failed process's output."""
_ERROR = re.compile(r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b.*)")
"""The last line of a traceback."""
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
CPU_ALONE: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
}
"""Environment of CPU benchmarks, with one thread per rank."""


class RankError(RuntimeError):
    """A rank failed or exceeded the time limit. A failed rank's error is the message.

    ``log`` is the output of all ranks, ``found`` the last result that rank 0 wrote.
    """

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log
        self.found: Row = {}


@dataclass(frozen=True)
class Node:
    """Prefix of the commands of a node's ranks, and the network device for gloo."""

    prefix: tuple[str, ...] = ()
    interface: str = LOOPBACK


HERE = Node()


@dataclass(frozen=True)
class Place:
    """Rank, world size and folder of a rank process."""

    rank: int
    world_size: int
    folder: Path
    """Holds the ranks' results and their store."""

    def write(self, found: Mapping[str, Any], suffix: str = ".json") -> None:
        """Replace this rank's result atomically. A killed process leaves its previous result."""
        write_json(self.folder / f"rank{self.rank}{suffix}", found)

    def join(self, device: torch.device | None = None, *, is_shared: bool = False) -> None:
        """Join the process group of all ranks, over gloo and the device's backend.

        With ``is_shared``, several ranks share the device, which only gloo supports.
        """
        if dist.is_initialized():
            return
        backend = "gloo"
        if device is not None and device.type != "cpu":
            own = "gloo" if is_shared else dist.get_default_backend_for_device(device)
            backend = f"cpu:gloo,{device.type}:{own}"
        store = dist.FileStore(str(self.folder / "store"), self.world_size)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size)


def write_json(path: Path, found: object) -> None:
    """Write an indented JSON file atomically."""
    beside = path.with_name(f"{path.name}.partial")
    beside.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)


def run_ranks(
    target: str,
    arguments: Mapping[str, Any],
    num_ranks: int = 1,
    *,
    environment: Mapping[str, str] = CPU_ALONE,
    nodes: Sequence[Node] = (HERE,),
    limit_s: float = TIME_LIMIT_S,
    python: str | None = None,
) -> list[Row]:
    """Call a function in ``num_ranks`` processes and return the result of each.

    Args:
        target: ``module:function``, called with the rank's `Place` and ``arguments``.
        arguments: plain values and dataclasses, which the function gets as JSON.
        environment: variables added to this process's own.
        nodes: nodes with equally many ranks each. Ranks get torchrun's variables.
        python: interpreter; None for this process's.

    Raises:
        RankError: a rank failed or exceeded the time limit.
    """
    plain = json.dumps(arguments, default=asdict)
    per_node = num_ranks // len(nodes)
    commands, environments = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for rank in range(num_ranks):
            node = nodes[rank // per_node]
            program = ("-m", "benchmarks.harness.rank", target, plain, scratch)
            commands.append([*node.prefix, python or sys.executable, *program])
            of_rank = rank_variables(rank, num_ranks, per_node=per_node)
            of_rank["GLOO_SOCKET_IFNAME"] = node.interface
            environments.append({**own_environment(), **of_rank, **environment})
        files = [Path(scratch, f"rank{rank}.json") for rank in range(num_ranks)]
        try:
            run_together(commands, environments, Path(scratch), limit_s=limit_s)
        except RankError as error:
            with suppress(OSError, ValueError):
                error.found = json.loads(files[0].read_text(encoding="utf-8"))
            raise
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def run_together(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    folder: Path,
    *,
    work_folder: Path | None = None,
    limit_s: float = TIME_LIMIT_S,
) -> None:
    """Run commands at the same time, with their output in files of ``folder``.

    Raises RankError if a command fails or exceeds the time limit. All commands are then killed.
    """
    # Files instead of pipes, because a full pipe would block a rank and with it all others.
    logs = [folder / f"{number}.log" for number in range(len(commands))]
    ranks = []
    for command, environment, log in zip(commands, environments, logs, strict=True):
        with log.open("wb") as file:
            ranks.append(
                subprocess.Popen(
                    command,
                    cwd=work_folder,
                    env=environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a rank's own children are killed with its session
                )
            )
    is_late = _wait(ranks, limit_s)
    said = "\n".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)
    if any(rank.returncode for rank in ranks):
        reason = f"ended after {limit_s:.0f} s" if is_late else _why(ranks, said, folder)
        raise RankError(reason, said)


def rank_variables(
    rank: int, num_ranks: int, *, per_node: int, port: str = "29500"
) -> dict[str, str]:
    """Return torchrun's variables of a rank, with ``port`` on this machine for the store."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(rank // per_node),
        # DeepSpeed requires an address even if the process group already exists.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def own_environment() -> dict[str, str]:
    """Return this process's variables, extended so that programs can import `benchmarks`."""
    paths = {
        # DeepSpeed compiles its Adam with ninja, which may be in the folder of this interpreter.
        "PATH": [str(Path(sys.executable).parent), os.environ.get("PATH", "")],
        "PYTHONPATH": [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])],
    }
    joined = {name: os.pathsep.join(parts) for name, parts in paths.items()}
    return {**os.environ, **joined, "HF_HUB_OFFLINE": "1"}


def _wait(ranks: Sequence[subprocess.Popen[bytes]], limit_s: float) -> bool:
    """Wait until all ranks end, one fails or the time is up, then kill the rest.

    Return whether time was up.
    """
    limit = time.monotonic() + limit_s
    try:
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks):
                return False
            if time.monotonic() > limit:
                return True
            time.sleep(0.1)
        return False
    finally:  # also after Ctrl-C, which does not reach the ranks' sessions
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
        for rank in ranks:
            rank.wait()


def _why(ranks: Sequence[subprocess.Popen[bytes]], said: str, folder: Path) -> str:
    """Return the first error of a rank, from the rank's file or otherwise from the output."""
    failures = sorted(folder.glob("*.failure"), key=lambda path: path.stat().st_mtime_ns)
    if failures:
        return str(json.loads(failures[0].read_text(encoding="utf-8"))["error"])
    spoken = [line for line in said.splitlines() if line.strip()]
    raised = [match.group(1)[:300] for line in spoken if (match := _ERROR.match(line))]
    lines = raised[:1] or spoken[-1:]
    killed = next((-rank.returncode for rank in ranks if rank.returncode < 0), 0)
    # If a rank failed by itself, the others were killed by `_wait`.
    if killed and not any(rank.returncode > 0 for rank in ranks):
        lines.append(f"(ended by signal {killed})")
    return " ".join(lines) or "no output"


class Runner:
    """Starts ranks within a common time limit and turns failures into rows."""

    def __init__(
        self, limit_s: float = math.inf, *, device_type: str = "cpu", python: str | None = None
    ) -> None:
        self.limit_s = limit_s
        self._python = python
        # A CPU benchmark must not use an accelerator of the machine.
        self._environment = CPU_ALONE if device_type == "cpu" else {}
        self._end = time.monotonic() + limit_s

    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def start(
        self,
        target: str,
        arguments: Mapping[str, Any],
        num_ranks: int = 1,
        *,
        threads: int | None = None,
        nodes: Sequence[Node] = (HERE,),
    ) -> list[Row]:
        """Return the ranks' results, or one row with the reason as ``failure`` or ``skipped``.

        A failure's row also has the end of the output and rank 0's last result. ``threads`` sets
        each rank's OMP_NUM_THREADS.
        """
        left_s = self.left_s()
        if not left_s:
            return [{"skipped": f"the time limit of {self.limit_s:.0f} s is over"}]
        own = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        environment = {**self._environment, **own}
        limit_s = left_s if math.isfinite(left_s) else TIME_LIMIT_S
        try:
            return run_ranks(
                *(target, arguments, num_ranks),
                environment=environment,
                nodes=nodes,
                limit_s=limit_s,
                python=self._python,
            )
        except RankError as error:
            return [{**error.found, "failure": str(error), "log": error.log[-LOG_LENGTH:]}]
