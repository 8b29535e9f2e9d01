"""Processes of this host, by their numbers."""

from __future__ import annotations

import os
from pathlib import Path


def process_namespace() -> str:
    """Return what processes must have in common for their numbers to mean the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_state(pid: int) -> str:
    """Return the letter of a process's state as in ``/proc/PID/stat``: "T" stopped, "Z" ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "Z"
    return stat[stat.rindex(")") + 2]
