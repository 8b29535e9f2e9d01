"""Memory of a process, its machine and its device.

Ranks of one host read each other's shards in shared memory. The kernel counts a shared page as
resident in every process that has touched it. Read-only maps of other ranks' memory are therefore
subtracted. A process's counters miss page-locked memory, so `HostWatch` measures the whole machine.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path

import torch

from zero_engine.machine import memory_limit_bytes

MIB, GIB = 2**20, 2**30
INTERVAL_S = 0.1
_PEERS = re.compile(r"^\S+ r--s .*/memfd:zero_core")
_HEADER = re.compile(r"^[0-9a-f]+-[0-9a-f]+ ")


def resident_bytes() -> int:
    return _field("self/status", "VmRSS") - _peers_bytes()


def peak_bytes() -> int:
    """Return the largest resident memory since `restart_peak`, without other ranks' memory.

    The present size of read-only maps of other ranks' memory is subtracted. The maps exist from the
    first optimizer step on. If memory peaked before that step, the result is too small.
    """
    return _field("self/status", "VmHWM") - _peers_bytes()


def restart_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def available_bytes() -> int:
    """Return the smaller of the kernel's MemAvailable and the cgroup's memory limit."""
    available, limit = machine_available_bytes(), memory_limit_bytes()
    return available if limit is None else min(limit, available)


def machine_available_bytes() -> int:
    return _field("meminfo", "MemAvailable")


class HostWatch:
    """Measures how far the machine's available memory drops after construction.

    Other processes count too, so the machine should be idle. A thread reads the counter every 0.1 s
    until `stop`.
    """

    def __init__(self) -> None:
        self._before = self._least = machine_available_bytes()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._is_over.set()
        self._thread.join()
        self._update()
        return self._before - self._least

    def _watch(self) -> None:
        while not self._is_over.wait(INTERVAL_S):
            self._update()

    def _update(self) -> None:
        self._least = min(self._least, machine_available_bytes())


def device_peaks(device: torch.device) -> dict[str, int | None]:
    if device.type == "cpu":
        return {"device_peak_bytes": None, "device_reserved_bytes": None}
    return {
        "device_peak_bytes": torch.accelerator.max_memory_allocated(device),
        "device_reserved_bytes": torch.accelerator.max_memory_reserved(device),
    }


def limit_device(limit_bytes: int | None, device: torch.device) -> int | None:
    """Limit the memory of torch's allocator. Return the limit, or None without a limit."""
    if limit_bytes is None or device.type == "cpu":
        return None
    _, total = torch.accelerator.get_memory_info(device)
    if total < limit_bytes:
        raise RuntimeError(f"the device has {total} bytes, less than the limit of {limit_bytes}")
    torch.get_device_module(device).set_per_process_memory_fraction(limit_bytes / total, device)
    return limit_bytes


def _field(file: str, name: str) -> int:
    for line in Path("/proc", file).read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/{file} has no {name}: memory is measured on Linux only")


def _peers_bytes() -> int:
    total, is_peers = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if _HEADER.match(line):
            is_peers = _PEERS.match(line) is not None
        elif is_peers and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total
