"""Memory of a process, each shared page counted in the shares of those who share it.

Ranks of one host read each other's shards where they lie, and the kernel counts such a page as
resident in every process that has looked at it. So figures here are proportional (PSS), and a peak
is the highest resident size less what of it belongs to others.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["peak_bytes", "resident_bytes", "restart_peak"]


def resident_bytes() -> int:
    """What is resident now: own pages, and this process's share of common ones."""
    return _read("smaps_rollup", "Pss")


def peak_bytes() -> int:
    """The highest `resident_bytes` since `restart_peak`, if what is shared has only grown."""
    return _read("status", "VmHWM") - _read("status", "VmRSS") + resident_bytes()


def restart_peak() -> None:
    """Let `peak_bytes` start from here."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _read(file: str, name: str) -> int:
    for line in Path("/proc/self", file).read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/{file} has no {name}: memory is measured on Linux only")
