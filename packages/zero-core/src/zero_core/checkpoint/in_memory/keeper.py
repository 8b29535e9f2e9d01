"""Launcher of this rank, and the program that removes its folder when it and all ranks have ended.

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

# Variables that torchrun sets. The second one is a path that is different for each rank.
MARK, _ERRORS = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"
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


def find_launcher() -> int:
    """Return the id of the process that restarts this rank."""
    # The launcher is the nearest ancestor without the values that it set for this rank. A shell may
    # be in between. A nested launcher has the same variables with the outer launcher's values.
    own = {os.fsencode(f"{n}={os.environ[n]}") for n in (MARK, _ERRORS) if n in os.environ}
    process = os.getppid()
    while own and process > 1:
        try:
            variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        except OSError:  # another user's process, or not Linux
            break
        fields = status(process)
        if not own.issubset(variables) or not fields:  # no fields: the process has just ended
            break
        process = int(fields[1])
    return process


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
