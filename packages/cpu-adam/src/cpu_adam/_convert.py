"""`convert_state`: change the format of an optimizer's states."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from cpu_adam import reference
from cpu_adam._slots import (
    MASTER,
    MASTER_DTYPES,
    REMAINDER,
    SCALES,
    STATE_DTYPES,
    check_master,
    check_name,
    local_of,
)
from cpu_adam.optimizer import CPUAdam

OptimizerOrState = TypeVar("OptimizerOrState", CPUAdam, dict[str, Any])


def convert_state(
    optimizer_or_state: OptimizerOrState, dtype: str, master_dtype: str | None = None
) -> OptimizerOrState:
    """Convert moments to another dtype, and master weights to another format.

    Converting moments from bf16 to fp32 is exact. From int8 to fp32, only the second moment is
    rounded, because the stored root is squared. Other conversions round to nearest. Step counts do
    not change. Master weights change only if ``master_dtype`` is given.

    Joining a remainder and its parameter is exact. Splitting moves a value midway between two bf16
    numbers by one fp32 ulp if it was rounded toward zero (one value in 131,072), and turns
    magnitudes up to 2**-134 into zero. A state dict has no parameters: splitting in it assumes bf16
    parameters equal to their rounded masters, as `CPUAdam` leaves them, and joining is refused.

    Args:
        optimizer_or_state: a `CPUAdam`, changed in place, or the result of its or
            torch.optim.AdamW's ``state_dict()``, which is not changed.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"int8"``.
        master_dtype: ``"float32"`` or ``"split"``, for all groups; None to keep masters.

    Returns:
        The optimizer, or a new state dict that shares unchanged tensors.

    Raises:
        TypeError: neither a `CPUAdam` nor a state dict; or a format's name is not a string.
        ValueError: unknown ``dtype`` or ``master_dtype``; an fp16 parameter cannot be split; a bf16
            parameter is not its rounded master; or a state dict has masters to be joined. After an
            error, nothing has changed.
    """
    settings = {"state_dtype": check_name("dtype", dtype, STATE_DTYPES)}
    if master_dtype is not None:
        settings["master_dtype"] = check_name("master_dtype", master_dtype, MASTER_DTYPES)
    if isinstance(optimizer_or_state, CPUAdam):
        for group in optimizer_or_state.param_groups:
            for param in group["params"]:
                check_master(param, master_dtype)
        old = optimizer_or_state.state
        # Convert everything before changing anything.
        old.update({p: _convert(state, p, dtype, master_dtype) for p, state in old.items()})
        for group in (*optimizer_or_state.param_groups, optimizer_or_state.defaults):
            group.update(settings)
        return optimizer_or_state
    given: Any = optimizer_or_state
    if isinstance(given, dict) and {"state", "param_groups"} <= set(given):
        states = optimizer_or_state["state"].items()
        return {
            **optimizer_or_state,
            "state": {key: _convert(state, None, dtype, master_dtype) for key, state in states},
            "param_groups": [{**group, **settings} for group in optimizer_or_state["param_groups"]],
        }
    raise TypeError(
        "optimizer_or_state: expected a CPUAdam or its state_dict(), "
        f"got {type(optimizer_or_state).__name__}"
    )


def _convert(
    state: dict[str, Any], param: Tensor | None, dtype: str, master_dtype: str | None
) -> dict[str, Any]:
    """Convert the state of one parameter. ``param`` is None for a state dict."""
    state = _convert_moments(state, dtype)
    if master_dtype == "split" and MASTER in state:
        state[REMAINDER] = _split(state.pop(MASTER), param)
    elif master_dtype == "float32" and REMAINDER in state:
        state[MASTER] = _join(state.pop(REMAINDER), param)
    return state


def _split(master: Tensor, param: Tensor | None) -> Tensor:
    """Return the fp32 bits of master weights minus those of their widened parameters, as int16.

    The difference of NaNs and zeros is 0. That of a midway value that was rounded toward zero is
    32768, which is clipped to 32767.
    """
    whole = _memory_order(master).numpy()
    upper = reference.float32_to_bfloat16(whole) if param is None else _bits(param)
    rounded = reference.bfloat16_to_float32(upper)
    distance = (whole.view(np.uint32) - rounded.view(np.uint32)).view(np.int32)
    is_nan = np.isnan(whole)
    distance = np.where(is_nan | ((whole == 0) & (rounded == 0)), 0, distance)
    is_rounded = (distance >= -32768) & (distance <= 32768) & (is_nan == np.isnan(rounded))
    if not is_rounded.all():
        raise ValueError(
            "master_dtype: a parameter is not its master weight, rounded, and so not the "
            "upper half of it; was it changed since the last step?"
        )
    remainder = np.clip(distance, -32768, 32767).astype(np.int16)
    return _like(master, torch.from_numpy(remainder), torch.int16)


def _join(remainder: Tensor, param: Tensor | None) -> Tensor:
    """Return the fp32 master weights that bf16 parameters and remainders encode."""
    if param is None:
        raise ValueError(
            "master_dtype: a state dict has the remainder alone, not the parameter that it "
            "belongs to; load it and convert the optimizer"
        )
    master = reference.combine_master(_bits(param), _memory_order(remainder).numpy())
    return _like(remainder, torch.from_numpy(master), torch.float32)


def _convert_moments(state: dict[str, Any], dtype: str) -> dict[str, Any]:
    kinds = STATE_DTYPES[dtype]
    if "exp_avg" not in state or all(state[name].dtype is kinds[name] for name in kinds):
        return dict(state)
    kept = {name: value for name, value in state.items() if name not in SCALES}
    exp_avg, exp_avg_sq = (_memory_order(state[name]) for name in ("exp_avg", "exp_avg_sq"))
    is_int8 = exp_avg_sq.dtype is torch.uint8
    if is_int8:
        scale, root_scale = (state[name].numpy() for name in SCALES)
        first = reference.dequantize_exp_avg(exp_avg.numpy(), scale)
        root = reference.dequantize_exp_avg_sq_root(exp_avg_sq.numpy(), root_scale)
    else:
        first = exp_avg.to(torch.float32).numpy()
        root = np.sqrt(exp_avg_sq.to(torch.float32).numpy())
    if dtype == "int8":
        names = ("exp_avg", "exp_avg_sq", *SCALES)
        codes = reference.quantize_moments(first, root)
        values = dict(zip(names, map(torch.from_numpy, codes), strict=True))
        kept.update({name: values[name] for name in SCALES})
    else:
        if is_int8:  # int8 moments store only the root of the second moment
            exp_avg_sq = torch.from_numpy(root * root)
        values = {"exp_avg": torch.from_numpy(first), "exp_avg_sq": exp_avg_sq}
    for name, kind in kinds.items():
        kept[name] = _like(state[name], values[name].to(kind), kind)
    return kept


def _memory_order(tensor: Tensor) -> Tensor:
    """View a dense tensor as 1-D, in memory order."""
    local = local_of(tensor).detach()
    return torch.as_strided(local, (local.numel(),), (1,))


def _bits(param: Tensor) -> Any:
    """View a bf16 tensor as a 1-D uint16 array, in memory order."""
    return _memory_order(param).view(torch.int16).numpy().view(np.uint16)


def _like(old: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy ``values`` (in memory order) to a new tensor with ``old``'s shape and strides."""
    new = torch.zeros_like(old, dtype=dtype)
    _memory_order(new).copy_(values)
    return new
