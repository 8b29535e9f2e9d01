"""``deepspeed.checkpointing``: activation checkpointing by torch.utils.checkpoint.

As in DeepSpeed, DeepSpeed's keys of ``activation_checkpointing`` have an effect only on calls of
`checkpoint`, after `configure` has read them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zero_engine.deepspeed.config.reader import Source, read
from zero_engine.deepspeed.errors import NotServedError

_log = logging.getLogger(__name__)


_is_configured = _is_on_cpu = False


def configure(
    mpu_: Any,
    deepspeed_config: Source | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set whether `checkpoint` keeps its inputs in host memory until backward.

    ``checkpoint_in_cpu`` has precedence over ``cpu_checkpointing`` of ``deepspeed_config``.
    A true ``profile`` raises NotServedError. The remaining arguments have no effect.
    """
    global _is_configured, _is_on_cpu
    without_effect = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
    }
    if profile:
        raise NotServedError("checkpointing.configure(profile=True)", "use torch.profiler")
    for key, value in without_effect.items():
        if value:
            _log.info("checkpointing.configure: %s = %r has no effect here", key, value)
    if deepspeed_config is not None:
        _is_on_cpu = read(deepspeed_config).cpu_checkpointing
    if checkpoint_in_cpu is not None:
        _is_on_cpu = checkpoint_in_cpu
    _is_configured = True


def is_configured() -> bool:
    return _is_configured


def reset() -> None:
    """Do nothing: calls of `checkpoint` share no state."""


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function``, and call it again in backward (Chen et al., arXiv 1604.06174)."""
    is_pinned = torch.accelerator.is_available()
    with save_on_cpu(is_pinned) if _is_on_cpu else nullcontext():
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


non_reentrant_checkpoint = checkpoint


def get_cuda_rng_tracker() -> Any:
    """Return a tracker whose ``fork``, which Megatron's layers enter for dropout, does nothing."""
    return SimpleNamespace(fork=lambda name="model-parallel-rng": nullcontext())


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the generators of the host and of every device."""
    torch.manual_seed(seed)
