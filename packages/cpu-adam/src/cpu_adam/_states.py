"""Checks of parameters, and creation of their states at the first step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpu_adam import _kernels
from cpu_adam._scalars import finite_number
from cpu_adam._slots import (
    MASTER,
    MASTER_DTYPES,
    REMAINDER,
    SCALES,
    STATE_DTYPES,
    TYPES,
    local_of,
)


def check_master(param: Tensor, master_dtype: str | None) -> None:
    """Refuse a parameter whose master weight cannot have the form ``master_dtype``."""
    if master_dtype == "split" and param.dtype is torch.float16:
        raise ValueError(
            "master_dtype: 'split' is for bf16 parameters, which are the upper half of an fp32 "
            "number; pass None or 'float32' for an fp16 parameter"
        )


def check_param(param: Tensor, master_dtype: str | None) -> None:
    """Refuse a parameter that cannot be updated."""
    if param.device.type != "cpu":
        raise ValueError(f"params: CPUAdam updates CPU parameters; got one on {param.device}")
    if param.layout is not torch.strided:
        raise ValueError(f"params: must be dense, got layout {param.layout}")
    if param.is_neg():
        raise ValueError("params: is a lazily negated view; pass param.resolve_neg()")
    if param.dtype not in TYPES:
        raise TypeError(f"params: dtype must be fp32, bf16 or fp16; got {param.dtype}")
    check_master(param, master_dtype)
    local = local_of(param)
    if not local.is_contiguous() and torch.empty_like(local).stride() != local.stride():
        raise ValueError(
            f"params: must fill its memory without gaps or overlap; got shape "
            f"{tuple(local.shape)} with strides {local.stride()}"
        )


def fill_state(
    param: Tensor, state: dict[str, Any], state_dtype: str, master_dtype: str | None
) -> None:
    """Create missing states, and convert a step count of any type."""
    step = state.get("step", 0.0)
    if not isinstance(step, Tensor) or step.dtype is not torch.float32 or not step.is_cpu:
        number = finite_number("state 'step'", step)
        state["step"] = torch.tensor(number, dtype=torch.float32)
    for name, dtype in STATE_DTYPES[state_dtype].items():
        if name not in state:
            state[name] = torch.zeros_like(param, dtype=dtype)
    if state_dtype == "int8":
        num_blocks = -(-local_of(param).numel() // _kernels.BLOCK_NUMEL)
        for name in SCALES:
            if name not in state:
                state[name] = torch.zeros(num_blocks, dtype=torch.float32)
    if param.dtype is not torch.float32:
        _fill_master(param, state, state_dtype, master_dtype)


def _fill_master(
    param: Tensor, state: dict[str, Any], state_dtype: str, master_dtype: str | None
) -> None:
    """Create the master weight of a 16-bit parameter, unless there is one in any form."""
    is_bfloat16 = param.dtype is torch.bfloat16
    found = next((n for n in (MASTER, REMAINDER) if n in state), None)
    if found == MASTER or (found == REMAINDER and is_bfloat16):
        if master_dtype is not None and found != MASTER_DTYPES[master_dtype]:
            raise ValueError(
                f"state {found!r}: is not what master_dtype {master_dtype!r} of its group keeps; "
                "cpu_adam.convert_state changes the one into the other"
            )
    elif (master_dtype or _default_master(param, state_dtype)) == "split":
        state[REMAINDER] = torch.zeros_like(param, dtype=torch.int16)
    else:
        state[MASTER] = param.detach().to(torch.float32)


def _default_master(param: Tensor, state_dtype: str) -> str:
    is_split = param.dtype is torch.bfloat16 and state_dtype != "float32"
    return "split" if is_split else "float32"
