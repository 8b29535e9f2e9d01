"""The CPU as the device that ranks compute on."""

from __future__ import annotations

import os
import resource
import sys

import torch
from torch import Tensor

from zero_engine.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from zero_engine.machine import memory_limit_bytes, used_bytes

__all__ = ["CpuAccelerator"]

CPU = torch.device("cpu")


class CpuAccelerator(DeepSpeedAccelerator):
    """The CPU as one device without an index. Memory is the process's resident set, in bytes."""

    Stream = None
    Event = None

    def __init__(self) -> None:
        super().__init__("cpu", "gloo")

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cpu", whatever the index."""
        return "cpu"

    def current_device_name(self) -> str:
        """Return "cpu"."""
        return "cpu"

    def current_device(self) -> int:
        """Return this rank's number on its machine."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    def device_count(self) -> int:
        """Ranks that the launcher started on this machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def device(self, device_index: int | None = None) -> torch.device:
        """Return the CPU, which as a context manager is the default device."""
        return CPU

    def set_device(self, device_index: int) -> None:
        """Do nothing: there is one device."""

    def is_available(self) -> bool:
        """Whether the CPU is there: True."""
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: calls return when their work is done."""

    def current_stream(self, device_index: int | None = None) -> None:
        """Return None: there are no streams."""

    default_stream = current_stream

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """State of torch's generator: uint8."""
        return torch.get_rng_state()

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Set what `get_rng_state` returned."""
        torch.set_rng_state(new_state)

    def default_generator(self, device_index: int | None = None) -> torch.Generator:
        """torch's generator."""
        return torch.default_generator

    def empty_cache(self) -> None:
        """Do nothing: torch keeps no freed host memory."""

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes resident now."""
        return used_bytes(CPU)

    memory_reserved = memory_cached = memory_allocated

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the largest resident set since the process started, in bytes."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    max_memory_reserved = max_memory_cached = max_memory_allocated

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Do nothing: the system's peak is that of the whole process."""

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        """Bytes resident now, and at most."""
        return {
            "allocated_bytes.all.current": self.memory_allocated(),
            "allocated_bytes.all.peak": self.max_memory_allocated(),
        }

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes that this machine or its container has, 0 if unknown."""
        return memory_limit_bytes() or 0

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that are left of it."""
        return max(0, self.total_memory() - self.memory_allocated())
