"""Freshly started rank processes, and the results that they write."""

from __future__ import annotations

import json
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
"""One result as JSON. With ``failure`` or ``skipped``, the reason, where there are no figures."""

ROOT = Path(__file__).parents[2]
"""The folder that has the package `benchmarks`."""
TIME_LIMIT_S = 600.0
LOG_LENGTH = 4000
"""Characters that are kept of the end of a failed process's output."""
CPU_ALONE: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
}
"""Environment of a comparison on the CPU, one thread per rank."""


class RankError(RuntimeError):
    """A rank failed. The message is its error.

    Attributes:
        log: the output of all ranks.
        found: by rank, the result that was written before the failure, or None.
    """

    def __init__(self, message: str, log: str, found: Sequence[Row | None] = ()) -> None:
        super().__init__(message)
        self.log = log
        self.found = found


@dataclass(frozen=True)
class Place:
    """A rank's place among the ranks that were started with it."""

    rank: int
    world_size: int
    folder: Path
    """For results and for the ranks' store."""

    @classmethod
    def here(cls, folder: str) -> Place:
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(folder))

    def write(self, found: Mapping[str, Any], suffix: str = ".json") -> None:
        """Replace this rank's result. A process that is killed meanwhile leaves the one before."""
        write_json(self.folder / f"rank{self.rank}{suffix}", found)

    def join(self, device: torch.device | None = None) -> None:
        """Join the process group of all ranks, over gloo and the device's own backend."""
        if dist.is_initialized():
            return
        backend = "gloo"
        if device is not None and device.type != "cpu":
            backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
        store = dist.FileStore(str(self.folder / "store"), self.world_size)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size)


def write_json(path: Path, found: object) -> None:
    """Write an indented file in one step: a reader finds the old one or the new one."""
    beside = path.with_name(f"{path.name}.partial")
    beside.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)


def program(target: str, arguments: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the command of a rank, without the interpreter.

    Args:
        target: ``module:function``; called with the rank's `Place` and ``arguments``.
        arguments: plain values and dataclasses, which arrive as JSON.
        folder: the result is its ``rank<N>.json``, an error its ``rank<N>.failure``.
    """
    plain = json.dumps(arguments, default=asdict)
    return ["-m", "benchmarks.harness.rank", target, plain, str(folder)]


def run_ranks(
    target: str,
    arguments: Mapping[str, Any],
    num_ranks: int,
    environment: Mapping[str, str],
    *,
    limit_s: float = TIME_LIMIT_S,
) -> list[Row]:
    """Run `program` as ``num_ranks`` processes of this machine and return each one's result.

    Args:
        target: see `program`.
        arguments: see `program`.
        num_ranks: processes, started at once.
        environment: variables, besides this process's own.
        limit_s: seconds after which they are killed.

    Raises:
        RankError: a rank failed, or took longer.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        files = [folder / f"rank{rank}.json" for rank in range(num_ranks)]
        command = [sys.executable, *program(target, arguments, folder)]
        environments = [
            {**_rank_environment(r, num_ranks), **environment} for r in range(num_ranks)
        ]
        try:
            run_together([command] * num_ranks, environments, folder, limit_s=limit_s)
        except RankError as error:
            error.found = [_read(file) for file in files]
            raise
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def run_together(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    folder: Path,
    *,
    limit_s: float = TIME_LIMIT_S,
) -> None:
    """Run commands at once, each in its environment, their output in files of ``folder``.

    Raises:
        RankError: one failed, or took longer than ``limit_s`` seconds; all were killed.
    """
    # Files, not pipes: a rank that writes more than a pipe holds would block the others.
    logs = [folder / f"{number}.log" for number in range(len(commands))]
    ranks = [
        _start(command, environment, log)
        for command, environment, log in zip(commands, environments, logs, strict=True)
    ]
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


def _rank_environment(rank: int, num_ranks: int) -> dict[str, str]:
    return {
        **own_environment(),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        # For DeepSpeed, which asks for them though the group is there already.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def _start(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[str]:
    with log.open("w", encoding="utf-8") as file:
        return subprocess.Popen(
            command,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # its own children are killed with it
        )


def _wait(ranks: Sequence[subprocess.Popen[str]], limit_s: float) -> bool:
    """Wait for all ranks, or until one fails, and return whether the time was over."""
    limit = time.monotonic() + limit_s
    is_late = False
    try:
        while any(rank.poll() is None for rank in ranks):
            has_failed = any(rank.poll() for rank in ranks)
            is_late |= not has_failed and time.monotonic() > limit
            if has_failed or is_late:
                _kill(ranks)
            time.sleep(0.1)
    finally:
        _kill(ranks)  # Ctrl-C does not reach sessions of their own
    return is_late


def _kill(ranks: Sequence[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
    for rank in ranks:
        rank.wait()


def _why(ranks: Sequence[subprocess.Popen[str]], said: str, folder: Path) -> str:
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


def _read(file: Path) -> Row | None:
    try:
        found: Row = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


class Runner:
    """Starter of single processes within a time limit, whose failures become rows.

    Attributes:
        limit_s: seconds from the construction on.
    """

    def __init__(self, limit_s: float, *, device_type: str) -> None:
        self.limit_s = limit_s
        # On the CPU nothing may find an accelerator that is there.
        self._environment = CPU_ALONE if device_type == "cpu" else {}
        self._end = time.monotonic() + limit_s

    def left_s(self) -> float:
        """Return the remaining seconds, 0 when the time is over."""
        return max(0.0, self._end - time.monotonic())

    def start(self, target: str, **arguments: Any) -> Row:
        """Return the result of `program`, or ``failure`` or ``skipped`` with the reason.

        A failure comes with the end of the output, and with the result that was written before.
        """
        left_s = self.left_s()
        if not left_s:
            return {"skipped": f"the time limit of {self.limit_s:.0f} s is over"}
        try:
            (found,) = run_ranks(target, arguments, 1, self._environment, limit_s=left_s)
        except RankError as error:
            rest = (error.found[0] if error.found else None) or {}
            return {**rest, "failure": str(error), "log": error.log[-LOG_LENGTH:]}
        return found
