"""The accelerator's interface as scripts call it: the part that is the same on every device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

__all__ = ["DeepSpeedAccelerator"]


class DeepSpeedAccelerator:
    """Questions about a kind of device, which has the name ``device_type`` in torch."""

    def __init__(self, device_type: str, backend: str) -> None:
        self.device_type = device_type
        self._communication_backend_name = backend
        self._ranges: list[torch.profiler.record_function] = []

    @property
    def _name(self) -> str:
        return self.device_type

    def device_name(self, device_index: int | None = None) -> str:
        """Return torch's name of the device, such as "cuda:1", or the kind without an index."""
        return self.device_type if device_index is None else f"{self.device_type}:{device_index}"

    def communication_backend_name(self) -> str:
        """Return the backend of torch.distributed for this device."""
        return self._communication_backend_name

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is on this kind of device."""
        return tensor.device.type == self.device_type

    def is_synchronized_device(self) -> bool:
        """Whether an operation has ended when its call returns."""
        return self.device_type == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = (
        is_synchronized_device
    )

    # Random numbers

    def random(self) -> ModuleType:
        """torch's module of random numbers."""
        return torch.random

    def manual_seed(self, seed: int) -> None:
        """Seed the generators of host and devices."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        """Return the seed of the host's generator."""
        return torch.initial_seed()

    # Numbers

    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bfloat16."""
        return True

    def is_fp16_supported(self) -> bool:
        """Whether the device computes in float16."""
        return True

    def is_fp64_supported(self) -> bool:
        """Whether the device computes in float64."""
        return self.device_type != "mps"

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that a model may have."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def is_triton_supported(self) -> bool:
        """Whether Triton has kernels for the device."""
        return self.device_type in ("cuda", "xpu")

    # Memory of the host

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """Return a page-locked copy of ``tensor``, or ``tensor`` itself on the CPU."""
        return tensor if self.device_type == "cpu" else tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is page-locked."""
        return tensor.is_pinned()

    # What else scripts call

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call ``callback``."""
        return callback()

    def range_push(self, msg: str, domain: object = None, category: object = None) -> None:
        """Open a range, named ``msg`` in the trace of `torch.profiler`."""
        opened = torch.profiler.record_function(msg)
        opened.__enter__()  # type: ignore[no-untyped-call]
        self._ranges.append(opened)

    def range_pop(self, domain: object = None) -> None:
        """Close the range opened last."""
        self._ranges.pop().__exit__(None, None, None)

    def stream(self, stream: torch.Stream | None) -> AbstractContextManager[Any]:
        """Return a context in which work is queued on ``stream``. None changes nothing."""
        return nullcontext() if stream is None else stream

    def export_envs(self) -> list[str]:
        """Variables that a launcher would pass on."""
        return []

    def visible_devices_envs(self) -> list[str]:
        """Variables that hide devices from a process."""
        return []

    def get_compile_backend(self) -> str:
        """torch.compile's backend."""
        return "inductor"
