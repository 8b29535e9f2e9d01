"""Program that removes a folder in memory when the launcher and all ranks have ended.

It imports only the standard library, because importing torch takes 200 MB of memory.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import sys
from contextlib import suppress
from pathlib import Path

USERS = ".users"  # file on which the keeper and every rank hold a shared lock


def status(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def started_at(pid: int) -> str:
    """Return a process's start time in ticks, or "". Processes that reuse an id differ in it."""
    return "".join(status(pid)[19:20])


def keep(folder: Path, launcher: int, start: str) -> None:
    """Wait until process ``launcher`` and all users have ended, and remove ``folder``."""
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
