"""An accelerator of torch (CUDA, XPU, MPS, ...) as the device that ranks compute on."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_engine.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

__all__ = ["TorchAccelerator"]


class TorchAccelerator(DeepSpeedAccelerator):
    """All devices of one kind. Memory is in bytes, and an index of None is the current device."""

    Stream = torch.Stream
    Event = torch.Event

    def __init__(self, kind: torch.device) -> None:
        super().__init__(kind.type, dist.get_default_backend_for_device(kind))
        self._module: Any = torch.get_device_module(kind)

    def current_device_name(self) -> str:
        """Return torch's name of this rank's device."""
        return self.device_name(self.current_device())

    def current_device(self) -> int:
        """Index of the current device."""
        return torch.accelerator.current_device_index()

    def device_count(self) -> int:
        """Devices of this machine that the process sees."""
        return torch.accelerator.device_count()

    def device(self, device_index: int | None = None) -> Any:
        """Return a context in which that device is the current one."""
        return torch.accelerator.device_index(device_index)

    def set_device(self, device_index: int) -> None:
        """Make it the current device."""
        torch.accelerator.set_device_index(device_index)

    def is_available(self) -> bool:
        """Whether there is one now."""
        return torch.accelerator.is_available()

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for all work of the device."""
        torch.accelerator.synchronize(device_index)

    def current_stream(self, device_index: int | None = None) -> torch.Stream:
        """Return the current stream."""
        return torch.accelerator.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        """Return the default stream."""
        return self._module.default_stream(device_index)

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """State of the device's generator: uint8, on the CPU."""
        state: Tensor = self._module.get_rng_state(*_given(device_index))
        return state

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Set what `get_rng_state` returned."""
        self._module.set_rng_state(new_state, *_given(device_index))

    def default_generator(self, device_index: int) -> torch.Generator:
        """Return the device's generator."""
        generator: torch.Generator = self._module.default_generators[device_index]
        return generator

    def empty_cache(self) -> None:
        """Give memory that is allocated, but not in use, back to the device."""
        torch.accelerator.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes in tensors now."""
        return torch.accelerator.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the most bytes in tensors since `reset_peak_memory_stats`."""
        return torch.accelerator.max_memory_allocated(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that torch holds now."""
        return torch.accelerator.memory_reserved(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Return the most bytes that torch held since `reset_peak_memory_stats`."""
        return torch.accelerator.max_memory_reserved(device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Let the peaks start from here."""
        torch.accelerator.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats
    memory_cached = memory_reserved
    max_memory_cached = max_memory_reserved

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Return the counters of torch's allocator."""
        return dict(torch.accelerator.memory_stats(device_index))

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes that the device has."""
        return torch.accelerator.get_memory_info(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that are free."""
        return torch.accelerator.get_memory_info(device_index)[0]


def _given(device_index: int | None) -> tuple[int, ...]:
    """Return the index as an argument, left out if it is None: torch's default has another form."""
    return () if device_index is None else (device_index,)
