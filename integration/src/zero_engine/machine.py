"""Resources of this machine: cores, memory limits, memory in use, device names."""

from __future__ import annotations

import math
import os
import platform
import re
import resource
import sys
from pathlib import Path

import torch

from zero_core.adapters import available_cores as available_cores
from zero_core.adapters import memory_limit_bytes as memory_limit_bytes
from zero_core.adapters import read_text
from zero_core.errors import ConfigError


def parse_bytes(text: str, name: str) -> int:
    """Return the bytes of "24GB" (decimal), "24GiB" (binary) or a number, or raise ConfigError."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([kmgt]?)(i?)b?", text.strip().lower())
    if match is not None:
        number, unit, binary = match.groups()
        scale: int = (1024 if binary else 1000) ** "_kmgt".index(unit or "_")
        found = float(number) * scale
        if not unit and 0 < found < 1e6 and name.startswith("--"):
            raise ConfigError(f"{name} {text}: {found:g} bytes? Give a unit, as in {number}GB")
        if math.isfinite(found) and round(found) > 0:
            return round(found)
    raise ConfigError(f"{name} {text}: expected a size such as 24GB or 22.5GiB")


def locked_memory_limit_bytes() -> int | None:
    """Return the limit of ``mlock`` in bytes, None if unlimited. CUDA's pinning ignores it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def used_bytes(device: torch.device) -> int:
    """Return the bytes that torch has allocated on a CUDA ``device``, else the resident set."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    resident = read_text(Path("/proc/self/statm")).split()
    if resident:
        return int(resident[1]) * os.sysconf("SC_PAGE_SIZE")
    return peak_bytes()  # systems without /proc report only the peak


def peak_bytes() -> int:
    """Return the largest resident set of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def accelerator_names() -> list[str]:
    if not torch.accelerator.is_available():
        return []
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    return [str(module.get_device_name(n)) for n in range(torch.accelerator.device_count())]


def processor_name() -> str:
    lines = read_text(Path("/proc/cpuinfo")).splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
