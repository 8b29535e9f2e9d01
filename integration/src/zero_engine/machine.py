"""Resources that the machine grants this process: cores, memory, and the memory in use.

A container's limits (cgroup v2 and v1) count for more than what the hardware has, because they
are what a training run hits first.
"""

from __future__ import annotations

import math
import os
import platform
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def parse_bytes(text: str) -> int | None:
    """Return the bytes of "24GB" (decimal), "24GiB" (binary) or a plain number, else None."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([kmgt]?)(i?)b?", text.strip().lower())
    if match is None:
        return None
    number, unit, binary = match.groups()
    scale: int = (1024 if binary else 1000) ** "_kmgt".index(unit or "_")
    found = float(number) * scale
    return round(found) if math.isfinite(found) else None


def available_cores(root: Path = CGROUP) -> int:
    """Return the cores of this process's affinity, capped by the cgroup's quota, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _cpu_quota(root)
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


def memory_limit_bytes(root: Path = CGROUP) -> int | None:
    """Bytes of host memory: the smaller of physical memory and the cgroup's limit, if known."""
    limits = [
        int(text)
        for name in ("memory.max", "memory/memory.limit_in_bytes")
        if (text := _read(root / name)).isdigit()
    ]
    with suppress(ValueError, OSError):  # without these names, the cgroup's limit is all there is
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(limits, default=None)


def locked_memory_limit_bytes() -> int | None:
    """Return the bytes that ``mlock`` may lock (``ulimit -l``). CUDA's pinning is not counted.

    None means that there is no limit.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def used_bytes(device: torch.device) -> int:
    """Bytes that this rank holds now: allocated on its GPU, or resident in host memory."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    resident = _read(Path("/proc/self/statm")).split()
    if resident:
        return int(resident[1]) * os.sysconf("SC_PAGE_SIZE")
    return peak_bytes()  # no /proc: the peak stands in


def peak_bytes() -> int:
    """Return the largest resident set of this process since it started."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def processor_name() -> str:
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def cache_bytes(root: Path = CACHES) -> int:
    """Return the size of the processor's largest cache, 0 where the system does not know it."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = [_read(path) for path in root.glob("index*/size")]
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size), default=0)


def _cpu_quota(root: Path) -> float | None:
    """Return the cgroup's CPU limit in cores, or None where there is none."""
    fields = _read(root / "cpu.max").split()  # version 2: "QUOTA PERIOD" or "max PERIOD"
    if not fields:  # version 1: two files, -1 for no quota
        fields = [_read(root / f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period")]
    quota, period = (*fields, "", "")[:2]
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
