"""Freshly started rank processes, and what they write when they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["RankError", "run_ranks"]

TIME_LIMIT_S = 600


class RankError(RuntimeError):
    """A rank ended with a failure; the message is its last line, ``log`` everything said."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


def run_ranks(
    module: str, arguments: Sequence[str], num_ranks: int, environment: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Run ``python -m module ARGUMENTS STORE RANK RESULT`` per rank; the JSON in each RESULT.

    Args:
        module: what every rank runs.
        arguments: its first arguments.
        num_ranks: how many are started, all at once.
        environment: what they get besides this process's own variables.

    Raises:
        RankError: a rank failed, or took more than 600 s.
    """
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch, f"rank{rank}.json") for rank in range(num_ranks)]
        # Files, not pipes: a rank that says more than a pipe holds would block the others.
        logs = [file.with_suffix(".log") for file in files]
        ranks = [
            _start(
                [
                    *(sys.executable, "-m", module, *arguments),
                    *(str(Path(scratch, "store")), str(rank), str(file)),
                ],
                {**_environment(rank, num_ranks), **environment},
                log,
            )
            for rank, (file, log) in enumerate(zip(files, logs, strict=True))
        ]
        _wait(ranks)
        said = "\n".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)
        if any(rank.returncode for rank in ranks):
            last_lines = [line for line in said.splitlines() if line.strip()][-1:]
            raise RankError(" ".join(last_lines) or "no output", said)
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def _start(command: Sequence[str], environment: dict[str, str], log: Path) -> subprocess.Popen[str]:
    with log.open("w", encoding="utf-8") as file:
        return subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, text=True
        )


def _wait(ranks: Sequence[subprocess.Popen[str]]) -> None:
    """Wait for all ranks; if one fails or the time is over, end those that are left."""
    limit = time.monotonic() + TIME_LIMIT_S
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks) or time.monotonic() > limit:
            for rank in ranks:
                rank.kill()
        time.sleep(0.1)


def _environment(rank: int, num_ranks: int) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "CUDA_VISIBLE_DEVICES": "",  # the comparison is of the CPU
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        # For DeepSpeed, which asks for them though the group is there already.
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
