"""``deepspeed.runtime.zero.offload_config``: names of the states that can be offloaded."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from zero_core import StatePart


class OffloadDeviceEnum(StrEnum):
    """Places of offloaded states."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """States of an engine, by DeepSpeed's names."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


PARTS: Mapping[OffloadStateTypeEnum, StatePart] = {
    OffloadStateTypeEnum.optim_states: StatePart.OPTIMIZER_STATES,
    OffloadStateTypeEnum.hp_params: StatePart.MASTER_WEIGHTS,
    OffloadStateTypeEnum.lp_params: StatePart.PARAMETERS,
    OffloadStateTypeEnum.lp_grads: StatePart.GRADIENTS,
    OffloadStateTypeEnum.contiguous_grad_buffer: StatePart.BUFFERS,
}
"""The engine's own names."""
