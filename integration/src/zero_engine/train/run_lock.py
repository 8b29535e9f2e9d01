"""Lock of a run's folder, and identification of the launchers that started the run.

torchrun restarts the ranks if one has failed (``--max-restarts``) or if nodes join or leave
(``--nnodes 1:2``), each time with the first start's command line. The folder therefore keeps a
number for each launcher of the last start. Ranks of the same launcher continue the run, even if
their command line requests a new one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from zero_core.checkpoint import find_launcher, started_at, write_synced
from zero_core.errors import ConfigError
from zero_engine.launch.started_ranks import GRACE_PERIOD_S
from zero_engine.train.options import Start
from zero_engine.train.settings import RunFolder


def longest_wait_s(start: Start) -> float:
    """Return the seconds to wait for another program, or for ranks of a killed launcher."""
    return GRACE_PERIOD_S if start in (Start.RESUME, Start.AUTO) else 10.0


class RunLock:
    """Lock of a run's folder. With flock, a process that ends releases it, too."""

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.lock
        self._lock: BaseFileLock | None = None

    def acquire(self, *, wait_s: float) -> None:
        """Take the lock. If it is held, print a message and wait for at most ``wait_s`` seconds."""
        folder = self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self._path) if _has_flock(folder) else SoftFileLock(self._path)
            with warnings.catch_warnings():
                # `_advice` replaces filelock's warning of a soft lock.
                warnings.simplefilter("ignore", UserWarning)
                try:
                    self._lock.acquire(timeout=0)
                except Timeout:
                    print(
                        f"another program trains in {folder} ({self._holder()}): waiting "
                        f"for its end, for at most {wait_s:.0f} s{self._advice('; ')}",
                        file=sys.stderr,
                    )
                    self._lock.acquire(timeout=wait_s)
            if advice := self._advice(": "):
                print(f"{self._path.parent}{advice}", file=sys.stderr)
        except Timeout:
            raise ConfigError(
                f"--output {folder}: another program trains in this folder ({self._holder()}). "
                f"Wait for its end, end it, or choose another folder{self._advice(': ')}"
            ) from None
        except OSError as error:
            raise ConfigError(f"--output {folder}: cannot be written: {error.strerror}") from None
        self._who.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")

    def _advice(self, separator: str) -> str:
        if not isinstance(self._lock, SoftFileLock):
            return ""
        return (
            f"{separator}its file system has no flock, so the lock of a program that was killed "
            f"stays until {self._path} is removed"
        )

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    @property
    def _who(self) -> Path:
        # A separate file: on a network file system a locked file may be unreadable.
        return self._path.with_name(f"{self._path.name}.holder")

    def _holder(self) -> str:
        try:
            return self._who.read_text(encoding="utf-8")
        except OSError:
            return "which one is not known"


def _has_flock(folder: Path) -> bool:
    """Return whether files in ``folder`` can be locked. Lustre needs an option for that."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        try:
            fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
            return False
    return True


def launch_numbers(device: torch.device) -> list[int]:
    """Return a number per launcher process of torchrun's. Every rank must call it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return []
    launcher = find_launcher()
    name = f"{socket.gethostname()} {launcher} {started_at(launcher)}"
    digest = hashlib.sha256(name.encode()).digest()
    own = torch.tensor([int.from_bytes(digest[:7], "big")], dtype=torch.int64, device=device)
    numbers = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(numbers, own)
    return sorted({int(number) for number in numbers})


def belongs_to(folder: RunFolder, numbers: list[int]) -> bool:
    try:
        known = json.loads(folder.launchers.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(known, list) and not set(numbers).isdisjoint(known)


def note_launch(folder: RunFolder, numbers: list[int]) -> None:
    aside = folder.launchers.with_name(f"{folder.launchers.name}.tmp")
    write_synced(aside, json.dumps(numbers).encode())
    aside.replace(folder.launchers)
