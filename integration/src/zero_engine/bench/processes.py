"""Freshly started rank processes, and what they write when they end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = [
    "CPU_ALONE",
    "RankError",
    "own_environment",
    "run_ranks",
    "run_together",
    "write_result",
]

TIME_LIMIT_S = 600.0
ERROR = re.compile(r"[\w.]*(Error|Exception)\b")
"""How the last line of a traceback begins; libraries may say something after it."""
CPU_ALONE: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
}
"""Environment of a comparison on the CPU, one thread per rank."""


class RankError(RuntimeError):
    """A rank ended with a failure; the message is its error, ``log`` everything said.

    Attributes:
        log: what all ranks said.
        found: by rank, what was in its RESULT by then; None where there was nothing whole.
    """

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log
        self.found: list[dict[str, Any] | None] = []


def run_ranks(
    module: str,
    arguments: Sequence[str],
    num_ranks: int,
    environment: Mapping[str, str],
    *,
    limit_s: float = TIME_LIMIT_S,
) -> list[dict[str, Any]]:
    """Run ``python -m module ARGUMENTS STORE RANK RESULT`` per rank; the JSON in each RESULT.

    Args:
        module: what every rank runs.
        arguments: its first arguments.
        num_ranks: how many are started, all at once.
        environment: what they get besides this process's own variables.
        limit_s: seconds after which they are ended.

    Raises:
        RankError: a rank failed, or took longer than that.
    """
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch, f"rank{rank}.json") for rank in range(num_ranks)]
        # Files, not pipes: a rank that says more than a pipe holds would block the others.
        logs = [file.with_suffix(".log") for file in files]
        commands = [
            (
                *(sys.executable, "-m", module, *arguments),
                *(str(Path(scratch, "store")), str(rank), str(file)),
            )
            for rank, file in enumerate(files)
        ]
        environments = [
            {**_environment(rank, num_ranks), **environment} for rank in range(num_ranks)
        ]
        try:
            run_together(commands, environments, logs, limit_s=limit_s)
        except RankError as error:
            error.found = [_read(file) for file in files]
            raise
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def write_result(path: str | Path, found: Mapping[str, Any]) -> None:
    """Put ``found`` into a RESULT; whoever ends this process meanwhile finds that of before."""
    beside = Path(f"{path}.partial")
    beside.write_text(json.dumps(found), encoding="utf-8")
    beside.replace(path)


def _read(file: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def run_together(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    logs: Sequence[Path],
    *,
    limit_s: float = TIME_LIMIT_S,
) -> None:
    """Run the commands, all at once, each in its environment and what it says into its log.

    Raises:
        RankError: one failed, or took longer than ``limit_s`` seconds; all have been ended.
    """
    ranks = [
        _start(command, environment, log)
        for command, environment, log in zip(commands, environments, logs, strict=True)
    ]
    is_late = _wait(ranks, limit_s)
    said = "\n".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)
    if any(rank.returncode for rank in ranks):
        reason = f"ended after {limit_s:.0f} s" if is_late else _last_words(ranks, said)
        raise RankError(reason, said)


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
            start_new_session=True,  # its own children end with it
        )


def _wait(ranks: Sequence[subprocess.Popen[str]], limit_s: float) -> bool:
    """Wait for all ranks; if one fails or the time is over, end those that are left.

    Returns:
        Whether the time was over.
    """
    limit = time.monotonic() + limit_s
    is_late = False
    try:
        while any(rank.poll() is None for rank in ranks):
            has_failed = any(rank.poll() for rank in ranks)
            is_late |= not has_failed and time.monotonic() > limit
            if has_failed or is_late:
                _end(ranks)
            time.sleep(0.1)
    finally:
        _end(ranks)  # a Ctrl-C does not reach sessions of their own
    return is_late


def _end(ranks: Sequence[subprocess.Popen[str]]) -> None:
    """End the ranks and whatever they have started."""
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
    for rank in ranks:
        rank.wait()


def _last_words(ranks: Sequence[subprocess.Popen[str]], said: str) -> str:
    """The last error that was said, or the last line; of a rank that a signal ended (no memory: 9),
    that too."""
    all_lines = [line for line in said.splitlines() if line.strip()]
    lines = ([line for line in all_lines if ERROR.match(line)] or all_lines)[-1:]
    killed = next((-rank.returncode for rank in ranks if rank.returncode < 0), 0)
    # The others are killed when one fails by itself: then that one's words count.
    if killed and not any(rank.returncode > 0 for rank in ranks):
        lines.append(f"(ended by signal {killed})")
    return " ".join(lines) or "no output"


def own_environment() -> dict[str, str]:
    """This process's variables, for programs that download nothing and compile what they need."""
    return {
        **os.environ,
        # DeepSpeed compiles its Adam with ninja, which may lie beside this interpreter alone.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "HF_HUB_OFFLINE": "1",
    }


def _environment(rank: int, num_ranks: int) -> dict[str, str]:
    return {
        **own_environment(),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        # For DeepSpeed, which asks for them though the group is there already.
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
