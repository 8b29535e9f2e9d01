"""Description of a rank's machine: versions, device, cores, threads and memory.

Lower limits of a container (cgroup v2 or v1) take precedence over the hardware's.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

CGROUP = Path("/sys/fs/cgroup")


def available_cores(root: Path = CGROUP) -> int:
    """Return how many cores this process may use, by its affinity and the cgroup's quota."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    fields = read_text(root / "cpu.max").split()  # cgroup v2 has "QUOTA PERIOD" or "max PERIOD"
    if not fields:  # cgroup v1 has two files, with -1 if there is no quota
        fields = [read_text(root / f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period")]
    quota, period = (*fields, "", "")[:2]
    if not quota.isdigit() or not period.isdigit():
        return cores
    return max(1, min(cores, int(quota) // int(period)))


def memory_limit_bytes(root: Path = CGROUP) -> int | None:
    """Return the bytes of the host's memory, or the cgroup's lower limit. None if unknown."""
    limits = [
        int(text)
        for name in ("memory.max", "memory/memory.limit_in_bytes")
        if (text := read_text(root / name)).isdigit()
    ]
    with suppress(ValueError, OSError):  # sysconf lacks these names on some systems
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(limits, default=None)


def describe_environment(device: torch.device) -> dict[str, Any]:
    versions = {}
    for name in ("zero-core", "zero-offload", "zero-comm", "cpu-adam", "zero-parts"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": versions,
        "host": platform.node(),
        "system": platform.platform(),
        "device": device.type,
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
    }
    if (memory := memory_limit_bytes()) is not None:
        found["host_memory"] = memory
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device_name"] = properties.name
        found["device_memory"] = properties.total_memory
    return found


def read_text(path: Path) -> str:
    """Return a file's stripped text, or "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
