"""Host memory as the machine sees it: page-locked memory is missing from a process's own count."""

from __future__ import annotations

import threading
from pathlib import Path

from zero_engine.machine import memory_limit_bytes

__all__ = ["HostWatch", "available_bytes"]

INTERVAL_S = 0.1


def available_bytes() -> int:
    """What could still be allocated: the kernel's estimate, within the cgroup's limit."""
    limit = memory_limit_bytes()
    available = _meminfo("MemAvailable")
    return available if limit is None else min(limit, available)


class HostWatch:
    """The largest drop of the machine's available memory since it was made.

    What other processes take in the meantime counts, so the machine should be idle. Measured every
    0.1 s by a thread of its own, until `stop`.
    """

    def __init__(self) -> None:
        self._before = self._least = _meminfo("MemAvailable")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Stop watching; the drop in bytes."""
        self._is_over.set()
        self._thread.join()
        self._look()
        return self._before - self._least

    def _watch(self) -> None:
        while not self._is_over.wait(INTERVAL_S):
            self._look()

    def _look(self) -> None:
        self._least = min(self._least, _meminfo("MemAvailable"))


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/meminfo has no {name}: memory is measured on Linux only")
