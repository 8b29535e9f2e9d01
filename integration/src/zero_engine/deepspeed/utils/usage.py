"""Functions of ``deepspeed.utils`` and ``deepspeed.runtime.utils`` that scripts call."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm_

from zero_engine.deepspeed.utils.logging import logger
from zero_engine.machine import peak_bytes

_GIB = 2**30
_P = ParamSpec("_P")
_R = TypeVar("_R")


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the device's memory and the process's peak, in GiB, on rank 0, if ``force``."""
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    logger.info(message)
    if torch.accelerator.is_available():
        now, peak = torch.accelerator.memory_allocated(), torch.accelerator.max_memory_allocated()
        logger.info("device: %.2f GiB allocated, at most %.2f GiB", now / _GIB, peak / _GIB)
    logger.info("host: at most %.2f GiB", peak_bytes() / _GIB)


def set_random_seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


def instrument_w_nvtx(func: Callable[_P, _R]) -> Callable[_P, _R]:
    """Record each call of ``func`` under its name in torch's profiler."""

    @functools.wraps(func)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch.profiler.record_function(func.__qualname__):
            return func(*args, **kwargs)

    return wrapped


class OnDevice:
    """A context that makes tensors on ``device``, with default dtype ``dtype``, if ``enabled``."""

    def __init__(
        self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True
    ) -> None:
        self.dtype = dtype
        self.enabled = enabled
        self.device = torch.device(device)

    def __enter__(self) -> None:
        if self.enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self.device.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.enabled:
            self.device.__exit__(*error)
            torch.set_default_dtype(self._before)
