"""Programs under fault injection: started, observed, and ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from zero_engine.train.metrics import read_metrics
from zero_engine.train.settings import RunFolder

END_S = 300.0
"""Seconds after which a program counts as hanging."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
LEAVE_WITHIN_S = 60.0
"""Seconds in which ranks must save and end after their launcher has died."""
MARK = "PROGRAM_OUTPUT"
"""Environment variable that marks a program's processes, also after their parent has ended."""


class Program:
    """A program in its own session. All of its processes are killed when the context ends."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        """Run Python with ``arguments`` and with ``variables`` added to the environment."""
        self._output = Path(tempfile.mkdtemp(), "output")
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **ENVIRONMENT, MARK: str(self._output), **variables},
            stdout=self._output.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pid in self.descendants():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._output.parent)

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait_for(self, has_come: Callable[[], bool]) -> None:
        """Wait until ``has_come()`` is true. Fail if the program ends first, or after `END_S`."""
        limit = time.monotonic() + END_S
        while not has_come():
            assert not self.has_ended, self.output
            assert time.monotonic() < limit, f"the moment has not come: {self.output}"
            time.sleep(0.02)

    def end(self) -> int:
        return self._process.wait(END_S)

    def kill(self) -> None:
        """Kill the started process but not its children."""
        self._process.kill()
        self._process.wait()

    def kill_all(self) -> None:
        """Kill the started process and its ranks, unless the process has ended."""
        for pid in [*self.ranks(), self.pid] if not self.has_ended else []:
            os.kill(pid, signal.SIGKILL)

    def descendants(self) -> list[int]:
        """Return the pids of all processes with this program's mark in their environment."""
        mark = f"{MARK}={self._output}".encode()
        found = []
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # the process has ended, or belongs to another user
                if mark in environment.read_bytes().split(b"\0"):
                    found.append(int(environment.parent.name))
        return found

    def ranks(self) -> list[int]:
        """Return the pids of the ranks that torchrun started, by local rank."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        found: dict[int, int] = {}
        for child in map(int, children):
            try:
                variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            except OSError:  # the process has ended
                continue
            values = dict(v.split(b"=", 1) for v in variables if b"=" in v)
            if b"LOCAL_RANK" in values:
                found[int(values[b"LOCAL_RANK"])] = child
        return [found[rank] for rank in sorted(found)]


def complete(*arguments: str, **variables: str) -> None:
    """Run a `Program` that must end with code 0."""
    with Program(*arguments, **variables) as program:
        assert program.end() == 0, program.output


def last_step(folder: RunFolder) -> int:
    if not folder.metrics.exists():
        return 0
    return max((int(entry["step"]) for entry in read_metrics(folder.metrics)), default=0)


def weights(folder: RunFolder) -> bytes:
    return (folder.hf / "model.safetensors").read_bytes()


def is_running(pid: int) -> bool:
    """Return whether a process runs. It need not be a child of this process."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def ranks_leave(ranks: list[int]) -> bool:
    """Wait until the processes have ended. Return whether they did within `LEAVE_WITHIN_S`."""
    limit = time.monotonic() + LEAVE_WITHIN_S
    while any(map(is_running, ranks)) and time.monotonic() < limit:
        time.sleep(0.05)
    return not any(map(is_running, ranks))
