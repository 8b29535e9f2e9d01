"""``deepspeed.accelerator``: torch.accelerator, or the CPU. Memory is in bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_core.errors import ConfigError
from zero_engine.machine import memory_limit_bytes, peak_bytes, used_bytes

CPU = torch.device("cpu")


def _call(function: Callable[[], Any]) -> Callable[..., Any]:
    """Return a method that ignores its arguments and calls ``function`` without any."""

    def method(self: DeepSpeedAccelerator, *_device_index: int | None, **_named: Any) -> Any:
        return function()

    return method


def _answer(value: Any) -> Callable[..., Any]:
    return _call(lambda: value)


class DeepSpeedAccelerator:
    """Base class of the accelerators. ``device_type`` is torch's name, such as "cpu" or "cuda"."""

    def __init__(self, device_type: str, backend: str) -> None:
        self.device_type = self._name = device_type
        self._communication_backend_name = backend
        self._ranges: list[torch.profiler.record_function] = []

    def device_name(self, device_index: int | None = None) -> str:
        return self.device_type if device_index is None else f"{self.device_type}:{device_index}"

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device_type

    def is_synchronized_device(self) -> bool:
        """Whether an operation has ended when its call returns."""
        return self.device_type == "cpu"

    use_host_timers = resolves_data_dependency = is_synchronized_device
    handles_memory_backpressure = is_synchronized_device

    random = _answer(torch.random)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)  # seeds host and devices
    initial_seed = staticmethod(torch.initial_seed)
    is_bf16_supported = is_fp16_supported = _answer(True)
    get_compile_backend = _answer("inductor")
    is_pinned = staticmethod(Tensor.is_pinned)
    lazy_call = staticmethod(lambda callback: callback())
    supported_dtypes = _call(lambda: [torch.float32, torch.float16, torch.bfloat16])
    export_envs = visible_devices_envs = _call(list)  # no variables for a launcher to pass on

    def is_fp64_supported(self) -> bool:
        return self.device_type != "mps"

    def is_triton_supported(self) -> bool:
        return self.device_type in ("cuda", "xpu")

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        return tensor if self.device_type == "cpu" else tensor.pin_memory()

    def range_push(self, msg: str, domain: object = None, category: object = None) -> None:
        """Open a range that `torch.profiler` records under the name ``msg``."""
        opened = torch.profiler.record_function(msg)
        opened.__enter__()  # type: ignore[no-untyped-call]
        self._ranges.append(opened)

    def range_pop(self, domain: object = None) -> None:
        self._ranges.pop().__exit__(None, None, None)

    def stream(self, stream: torch.Stream | None) -> AbstractContextManager[Any]:
        """Return a context that queues work on ``stream``, or a context without effect for None."""
        return nullcontext() if stream is None else stream


class CpuAccelerator(DeepSpeedAccelerator):
    """The CPU, with a device index per local rank. Used memory is the process's resident set."""

    Stream = None
    Event = None

    def __init__(self) -> None:
        super().__init__("cpu", "gloo")

    device_name = current_device_name = _answer("cpu")
    device = _answer(CPU)
    is_available = _answer(True)
    set_device = synchronize = current_stream = default_stream = empty_cache = _answer(None)
    # `peak_bytes` reads getrusage, whose peak cannot be reset.
    reset_peak_memory_stats = _answer(None)
    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats
    default_generator = _answer(torch.default_generator)

    current_device = _call(lambda: int(os.environ.get("LOCAL_RANK", "0")))
    device_count = _call(lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    get_rng_state = _call(torch.get_rng_state)

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    memory_allocated = memory_reserved = memory_cached = _call(partial(used_bytes, CPU))
    max_memory_allocated = max_memory_reserved = max_memory_cached = _call(peak_bytes)

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": self.memory_allocated(),
            "allocated_bytes.all.peak": self.max_memory_allocated(),
        }

    total_memory = _call(lambda: memory_limit_bytes() or 0)

    def available_memory(self, device_index: int | None = None) -> int:
        free: int = self.total_memory() - self.memory_allocated()
        return max(0, free)


def _of_device(name: str) -> Callable[..., Any]:
    """Return a method that calls ``torch.accelerator``'s function ``name`` for a device."""

    def method(self: TorchAccelerator, device_index: int | None = None) -> Any:
        return getattr(torch.accelerator, name)(device_index)

    method.__doc__ = f"See ``torch.accelerator.{name}``."
    return method


class TorchAccelerator(DeepSpeedAccelerator):
    """The devices of torch.accelerator, which have one type (CUDA, XPU, MPS, ...)."""

    Stream = torch.Stream
    Event = torch.Event

    def __init__(self, kind: torch.device) -> None:
        super().__init__(kind.type, dist.get_default_backend_for_device(kind))
        self._module: Any = torch.get_device_module(kind)

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    current_device = staticmethod(torch.accelerator.current_device_index)
    device_count = staticmethod(torch.accelerator.device_count)
    is_available = staticmethod(torch.accelerator.is_available)
    empty_cache = staticmethod(torch.accelerator.empty_cache)
    device = _of_device("device_index")
    set_device = _of_device("set_device_index")
    synchronize = _of_device("synchronize")
    current_stream = _of_device("current_stream")
    memory_allocated = _of_device("memory_allocated")
    max_memory_allocated = _of_device("max_memory_allocated")
    memory_reserved = memory_cached = _of_device("memory_reserved")
    max_memory_reserved = max_memory_cached = _of_device("max_memory_reserved")
    memory_stats = _of_device("memory_stats")
    reset_peak_memory_stats = _of_device("reset_peak_memory_stats")
    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def default_stream(self, device_index: int | None = None) -> Any:
        return self._module.default_stream(device_index)

    def get_rng_state(self, device_index: int | None = None) -> Any:
        """Return the state of the device's generator, a uint8 tensor on the CPU."""
        given = () if device_index is None else (device_index,)  # torch refuses None
        return self._module.get_rng_state(*given)

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        given = () if device_index is None else (device_index,)  # torch refuses None
        self._module.set_rng_state(new_state, *given)

    def default_generator(self, device_index: int) -> Any:
        return self._module.default_generators[device_index]

    def total_memory(self, device_index: int | None = None) -> int:
        return torch.accelerator.get_memory_info(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        return torch.accelerator.get_memory_info(device_index)[0]


@cache
def get_accelerator() -> DeepSpeedAccelerator:
    """Return torch's accelerator, or the CPU. Raises ConfigError if DS_ACCELERATOR disagrees."""
    device = torch.accelerator.current_accelerator(check_available=True)
    found = "cpu" if device is None else device.type
    asked = os.environ.get("DS_ACCELERATOR", found)
    if asked not in (found, "cpu") or (asked == "cpu" and found != "cpu"):
        raise ConfigError(
            f"DS_ACCELERATOR={asked}, but torch finds {found} here; unset it, or hide the "
            "accelerator from torch (CUDA_VISIBLE_DEVICES=) to compute on the CPU"
        )
    return CpuAccelerator() if device is None else TorchAccelerator(device)


def is_current_accelerator_supported() -> bool:
    return True
