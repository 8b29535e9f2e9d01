"""Program that keeps a folder in memory until the launcher and all ranks have ended.

It is run by path, with the standard library alone: importing torch would take 200 MB.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import sys
from contextlib import suppress
from pathlib import Path

USERS = ".users"  # file of the folder on which every rank and the keeper hold a shared lock


def status(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on, none if there is no process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def started_at(pid: int) -> str:
    """Return when a process was started, in ticks, or an empty string: numbers are used again."""
    return "".join(status(pid)[19:20])


def keep(folder: Path, launcher: int, start: str) -> None:
    """Wait for the end of process ``launcher`` and of all users, and remove ``folder``."""
    users = os.open(folder / USERS, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(users, fcntl.LOCK_SH)
    with suppress(ProcessLookupError):
        process = os.pidfd_open(launcher)
        if started_at(launcher) == start:
            select.select([process], [], [])
    fcntl.flock(users, fcntl.LOCK_EX)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    keep(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
