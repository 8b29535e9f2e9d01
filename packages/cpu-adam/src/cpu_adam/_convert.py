"""`convert_state`: conversion of an optimizer's states to another form."""

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
    """Convert the moments to another width, and master weights to another form.

    Moments from bf16 to fp32 are exact. From 8 bits to fp32 they are exact but for the second
    moment, the rounded square of the root that is kept. Other conversions round to nearest. Step
    counts do not change, nor do master weights without a ``master_dtype``: either form of them is
    valid with every ``dtype``.

    Converting a master weight loses nothing, except that one that is a tie (one value in 131,072)
    moves by one unit in the last place of fp32 when it is split. A state dict has no parameters:
    splitting assumes that all are bf16 and rounded from their master, as `CPUAdam` leaves them.
    Joining needs an optimizer, which has the other halves.

    Args:
        optimizer_or_state: a `CPUAdam`, changed in place, or the result of its ``state_dict()``
            (also of torch.optim.AdamW's), which is not changed.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"int8"``.
        master_dtype: ``"float32"`` or ``"split"``, of all groups; None to keep masters.

    Returns:
        The optimizer, or a new state dict that shares what did not change.

    Raises:
        TypeError: neither an optimizer of this package nor a state dict.
        ValueError: no such ``dtype`` or ``master_dtype``; or one that the parameters cannot have:
            an fp16 one to be split, a bf16 one that is not its master weight rounded, a split one
            to be joined in a state dict. Nothing has been changed in any case.
    """
    settings = {"state_dtype": check_name("dtype", dtype, STATE_DTYPES)}
    if master_dtype is not None:
        settings["master_dtype"] = check_name("master_dtype", master_dtype, MASTER_DTYPES)
    if isinstance(optimizer_or_state, CPUAdam):
        for group in optimizer_or_state.param_groups:
            for param in group["params"]:
                check_master(param, master_dtype)
        old = optimizer_or_state.state
        # Everything is converted before anything is changed.
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
    """Convert the state of one parameter, which is None in a state dict."""
    state = _convert_moments(state, dtype)
    if master_dtype == "split" and MASTER in state:
        state[REMAINDER] = _split(state.pop(MASTER), param)
    elif master_dtype == "float32" and REMAINDER in state:
        state[MASTER] = _join(state.pop(REMAINDER), param)
    return state


def _split(master: Tensor, param: Tensor | None) -> Tensor:
    """Return the remainder of a master weight beyond its bf16 parameter.

    A tie that was rounded down is 32768 away from its parameter, more than an int16 holds. NaNs,
    and zeros, have the remainder zero whatever their bits.
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
    """Return the master weight of a bf16 parameter and its remainder."""
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
        if is_int8:  # the root of others would round them
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
    """View a bf16 tensor as 1-D unsigned integers, in memory order."""
    return _memory_order(param).view(torch.int16).numpy().view(np.uint16)


def _like(old: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy ``values``, in memory order, into a tensor of the shape and strides of ``old``."""
    new = torch.zeros_like(old, dtype=dtype)
    _memory_order(new).copy_(values)
    return new
