"""``deepspeed.runtime.utils``: what of it scripts call."""

from __future__ import annotations

import random
import resource

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

from zero_engine.deepspeed.utils.logging import logger

__all__ = ["clip_grad_norm_", "see_memory_usage", "set_random_seed"]

_GIB = 2**30


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the device's memory and the process's peak on rank 0, in GiB, only if ``force``."""
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    logger.info(message)
    if torch.accelerator.is_available():
        now, peak = torch.accelerator.memory_allocated(), torch.accelerator.max_memory_allocated()
        logger.info("device: %.2f GiB allocated, at most %.2f GiB", now / _GIB, peak / _GIB)
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    logger.info("host: at most %.2f GiB", peak_kib * 1024 / _GIB)


def set_random_seed(seed: int) -> None:
    """Seed Python's and torch's generators."""
    random.seed(seed)
    torch.manual_seed(seed)
