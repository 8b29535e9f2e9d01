"""`convert_state`: the moments of an optimizer, or of its state dict, in another width."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from cpu_adam import reference
from cpu_adam._slots import SCALES, STATE_DTYPES, local_of
from cpu_adam.optimizer import CPUAdam

__all__ = ["convert_state"]

OptimizerOrState = TypeVar("OptimizerOrState", CPUAdam, dict[str, Any])


def convert_state(optimizer_or_state: OptimizerOrState, dtype: str) -> OptimizerOrState:
    """Store the moments as ``dtype``: 8 bits to fp32 and back, and bf16.

    8 bits to fp32 is exact, as is bf16 to fp32; the other ways round to nearest. Step counts and
    master weights (whole or split) are left as they are, and every form of them goes with every
    ``dtype``.

    Args:
        optimizer_or_state: a `CPUAdam`, changed in place, or what its ``state_dict()`` returned
            (also torch.optim.AdamW's), which is left alone.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"int8"``.

    Returns:
        The optimizer, or a new state dict that shares what did not change.

    Raises:
        TypeError: neither an optimizer of this package nor a state dict.
        ValueError: no such ``dtype``. Nothing has been changed in either case.
    """
    if dtype not in STATE_DTYPES:
        raise ValueError(f"dtype: must be one of {', '.join(STATE_DTYPES)}; got {dtype!r}")
    if isinstance(optimizer_or_state, CPUAdam):
        converted = {key: _convert(s, dtype) for key, s in optimizer_or_state.state.items()}
        for key, state in converted.items():
            optimizer_or_state.state[key] = state
        for group in optimizer_or_state.param_groups:
            group["state_dtype"] = dtype
        optimizer_or_state.defaults["state_dtype"] = dtype
        return optimizer_or_state
    given: Any = optimizer_or_state
    if isinstance(given, dict) and {"state", "param_groups"} <= set(given):
        return {
            **optimizer_or_state,
            "state": {k: _convert(s, dtype) for k, s in optimizer_or_state["state"].items()},
            "param_groups": [
                {**group, "state_dtype": dtype} for group in optimizer_or_state["param_groups"]
            ],
        }
    raise TypeError(
        "optimizer_or_state: expected a CPUAdam or its state_dict(), "
        f"got {type(optimizer_or_state).__name__}"
    )


def _convert(state: dict[str, Any], dtype: str) -> dict[str, Any]:
    if "exp_avg" not in state:
        return dict(state)
    if all(state[name].dtype is kind for name, kind in STATE_DTYPES[dtype].items()):
        return dict(state)
    kept = {name: value for name, value in state.items() if name not in SCALES}
    exp_avg, root = _read(state)
    if dtype == "int8":
        names = ("exp_avg", "exp_avg_sq", *SCALES)
        codes = reference.quantize_moments(exp_avg, root)
        values = dict(zip(names, map(torch.from_numpy, codes), strict=True))
        kept.update({name: values[name] for name in SCALES})
    else:
        exp_avg_sq = torch.from_numpy(root * root)
        if state["exp_avg_sq"].dtype is not torch.uint8:  # without the detour of a root
            exp_avg_sq = _memory_order(state["exp_avg_sq"])
        values = {"exp_avg": torch.from_numpy(exp_avg), "exp_avg_sq": exp_avg_sq}
    for name, kind in STATE_DTYPES[dtype].items():
        kept[name] = _like(state[name], values[name].to(kind), kind)
    return kept


def _memory_order(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in the order in which they lie in memory, 1-D."""
    local = local_of(tensor).detach()
    return torch.as_strided(local, (local.numel(),), (1,))


def _read(state: dict[str, Any]) -> tuple[Any, Any]:
    """The first moment and the root of the second, as 1-D fp32 arrays in memory order."""
    exp_avg, exp_avg_sq = (_memory_order(state[name]) for name in ("exp_avg", "exp_avg_sq"))
    if exp_avg_sq.dtype is torch.uint8:
        scale, root_scale = (state[name].numpy() for name in SCALES)
        return (
            reference.dequantize_exp_avg(exp_avg.numpy(), scale),
            reference.dequantize_exp_avg_sq_root(exp_avg_sq.numpy(), root_scale),
        )
    root = np.sqrt(exp_avg_sq.to(torch.float32).numpy())
    return exp_avg.to(torch.float32).numpy(), root


def _like(old: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """``values``, given in memory order, as a tensor of the shape and strides of ``old``."""
    new = torch.zeros_like(old, dtype=dtype)
    _memory_order(new).copy_(values)
    return new
