"""`get_accelerator`: the one object that stands for this machine's accelerator, or its CPU."""

from __future__ import annotations

import functools
import os

import torch

from zero_core.errors import ConfigError
from zero_engine.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from zero_engine.deepspeed.accelerator.cpu_accelerator import CpuAccelerator
from zero_engine.deepspeed.accelerator.torch_accelerator import TorchAccelerator

__all__ = ["get_accelerator", "is_current_accelerator_supported"]


@functools.cache
def get_accelerator() -> DeepSpeedAccelerator:
    """Return the accelerator that torch has found, else the CPU.

    Raises:
        ConfigError: the variable DS_ACCELERATOR asks for another; torch decides which one is there.
    """
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
    """Whether torch supports the accelerator: True."""
    return True
