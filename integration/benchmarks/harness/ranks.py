"""Freshly started rank processes, and the results that they write.

A rank process calls a function by its name, ``module:function``, with its `Place` and arguments
that went through JSON (`benchmarks.harness.rank` is its program).
"""

from __future__ import annotations

import json
import math
import os
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
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
CPU_ALONE: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
}
"""Environment of CPU benchmarks, with one thread per rank."""


class RankError(RuntimeError):
    """A rank failed. The message is its error.

    Attributes:
        log: the output of all ranks.
        found: the result that rank 0 wrote before the failure.
    """

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log
        self.found: Row = {}


@dataclass(frozen=True)
class Node:
    """A place for ranks, by default this machine's loopback.

    Attributes:
        prefix: words before a rank's command.
        interface: of the network, for gloo.
    """

    prefix: tuple[str, ...] = ()
    interface: str = LOOPBACK


HERE = Node()


@dataclass(frozen=True)
class Place:
    """A rank's place among the ranks that were started with it."""

    rank: int
    world_size: int
    folder: Path
    """Holds the ranks' results and their store."""

    def write(self, found: Mapping[str, Any], suffix: str = ".json") -> None:
        """Replace this rank's result. A process that is killed meanwhile leaves the one before."""
        write_json(self.folder / f"rank{self.rank}{suffix}", found)

    def join(self, device: torch.device | None = None, *, is_shared: bool = False) -> None:
        """Join the process group of all ranks, over gloo and the device's own backend.

        Several ranks can share a device over gloo alone.
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
    """Write an indented file in one step: a reader finds the old one or the new one."""
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
    """Call a function in ``num_ranks`` processes of this machine and return each one's result.

    Args:
        target: ``module:function``; called with the rank's `Place` and ``arguments``.
        arguments: plain values and dataclasses, which arrive as JSON.
        num_ranks: processes, started at once.
        environment: variables, besides this process's own.
        nodes: have equally many ranks each, which find their node as torchrun sets it.
        limit_s: seconds after which they are killed.
        python: the interpreter, by default this one.

    Raises:
        RankError: a rank failed, or took longer.
    """
    plain = json.dumps(arguments, default=asdict)
    per_node = num_ranks // len(nodes)
    commands, environments = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for rank in range(num_ranks):
            node = nodes[rank // per_node]
            program = ("-m", "benchmarks.harness.rank", target, plain, scratch)
            commands.append([*node.prefix, python or sys.executable, *program])
            of_rank = {
                "GLOO_SOCKET_IFNAME": node.interface,
                "RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_RANK": str(rank % per_node),
                "LOCAL_WORLD_SIZE": str(per_node),
                "GROUP_RANK": str(rank // per_node),
                # For DeepSpeed, which asks for them though the group is there already.
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": "29500",
            }
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
    """Run commands at once, each in its environment, their output in files of ``folder``.

    They run in ``work_folder``, or in the current one.

    Raises:
        RankError: one failed, or took longer than ``limit_s`` seconds; all were killed.
    """
    # Files, not pipes: a rank that writes more than a pipe holds would block the others.
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
                    start_new_session=True,  # its own children are killed with it
                )
            )
    is_late = _wait(ranks, limit_s)
    said = "\n".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)
    if any(rank.returncode for rank in ranks):
        reason = f"ended after {limit_s:.0f} s" if is_late else _why(ranks, said, folder)
        raise RankError(reason, said)


def own_environment() -> dict[str, str]:
    """Return this process's variables, for programs that import `benchmarks` and stay offline."""
    paths = {
        # DeepSpeed compiles its Adam with ninja, which may lie beside this interpreter alone.
        "PATH": [str(Path(sys.executable).parent), os.environ.get("PATH", "")],
        "PYTHONPATH": [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])],
    }
    joined = {name: os.pathsep.join(parts) for name, parts in paths.items()}
    return {**os.environ, **joined, "HF_HUB_OFFLINE": "1"}


def _wait(ranks: Sequence[subprocess.Popen[bytes]], limit_s: float) -> bool:
    """Wait for all ranks, or until one fails, and return whether the time was over."""
    limit = time.monotonic() + limit_s
    try:
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks):
                return False
            if time.monotonic() > limit:
                return True
            time.sleep(0.1)
        return False
    finally:  # also after Ctrl-C, which does not reach sessions of their own
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
        for rank in ranks:
            rank.wait()


def _why(ranks: Sequence[subprocess.Popen[bytes]], said: str, folder: Path) -> str:
    """Return the first error that a rank wrote, or the last line of output and the signal."""
    failures = sorted(folder.glob("*.failure"), key=lambda path: path.stat().st_mtime_ns)
    if failures:
        return str(json.loads(failures[0].read_text(encoding="utf-8"))["error"])
    lines = [line for line in said.splitlines() if line.strip()][-1:]
    killed = next((-rank.returncode for rank in ranks if rank.returncode < 0), 0)
    # The others are killed when one fails by itself.
    if killed and not any(rank.returncode > 0 for rank in ranks):
        lines.append(f"(ended by signal {killed})")
    return " ".join(lines) or "no output"


class Runner:
    """Starter of ranks within a time limit, whose failures become rows.

    Attributes:
        limit_s: seconds from the construction on.
    """

    def __init__(
        self, limit_s: float = math.inf, *, device_type: str = "cpu", python: str | None = None
    ) -> None:
        """``python``: the ranks' interpreter, by default this one."""
        self.limit_s = limit_s
        self._python = python
        # On the CPU nothing may find an accelerator that is there.
        self._environment = CPU_ALONE if device_type == "cpu" else {}
        self._end = time.monotonic() + limit_s

    def left_s(self) -> float:
        """Return the remaining seconds, 0 when the time is over."""
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
        """Return the ranks' results, or one row with ``failure`` or ``skipped`` and the reason.

        A failure has the end of the output, and what rank 0 had written before. ``threads`` of
        each rank are torch's or the environment's by default.
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
