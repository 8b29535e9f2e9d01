"""Lets Lightning's own DeepSpeed strategies run where there is no accelerator.

Lightning (2.6, ``DeepSpeedStrategy.setup_environment`` of the Trainer and of Fabric) refuses every
accelerator but CUDA's, as the real DeepSpeed needs it, and devices without a number. This engine
computes on CPUs, too.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch


def mend(module: Any) -> None:
    """Change ``module``, ``lightning.*.strategies.deepspeed``: its accelerator may be the CPU."""
    cuda = module.CUDAAccelerator
    cpu = importlib.import_module(cuda.__module__.rpartition(".")[0]).CPUAccelerator
    validate = module._validate_device_index_selection
    # The module uses the name for isinstance() alone, which takes several classes.
    module.CUDAAccelerator = (cuda, cpu)

    def validate_accelerators(devices: list[torch.device]) -> None:
        validate([device for device in devices if device.type != "cpu"])

    module._validate_device_index_selection = validate_accelerators
