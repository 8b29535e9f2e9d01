"""Memory of a process, without what it only looks at.

Ranks of one host read each other's shards where they lie, and the kernel counts such a page as
resident in every process that has looked at it. So what is mapped of other ranks, read-only, is
taken off here.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["peak_bytes", "resident_bytes", "restart_peak"]

_PEERS = re.compile(r"^\S+ r--s .*/memfd:zero_core")
_HEADER = re.compile(r"^[0-9a-f]+-[0-9a-f]+ ")


def resident_bytes() -> int:
    """What is resident now."""
    return _status("VmRSS") - _peers_bytes()


def peak_bytes() -> int:
    """The most since `restart_peak`.

    What is seen of peers is taken off as it is now. All of it is seen before an optimizer's first
    step, in which the peak of a training falls; of an earlier peak too much would be taken off.
    """
    return _status("VmHWM") - _peers_bytes()


def restart_peak() -> None:
    """Let `peak_bytes` start from here."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}: memory is measured on Linux only")


def _peers_bytes() -> int:
    total, is_peers = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if _HEADER.match(line):
            is_peers = _PEERS.match(line) is not None
        elif is_peers and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total
