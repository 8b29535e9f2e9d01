"""DeepSpeed's dynamic loss scales, as `zero_core.optim.train_state.LossScaler` keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_engine.deepspeed_import.torch_files import Record


def of_zero(state: Mapping[str, Any]) -> dict[str, float]:
    """Return the scale of a ZeRO optimizer's state: empty if it is constant.

    DeepSpeed doubles when the steps since the last overflow are a multiple of the window.
    """
    scaler = state.get("loss_scaler")
    if not state.get("dynamic_loss_scale") or not isinstance(scaler, Record):
        return {}
    found = vars(scaler)
    since = int(found["cur_iter"]) - int(found["last_overflow_iter"]) - 1
    return {
        "scale": float(found["cur_scale"]),
        "hysteresis_left": int(found.get("cur_hysteresis", 1)),
        "steps_since_change": since % int(found["scale_window"]),
    }


def of_stage_0(state: Mapping[str, Any]) -> dict[str, float]:
    """Return the scale of a 16-bit optimizer's state without ZeRO, which doubles a step later."""
    if not state.get("dynamic_loss_scale"):
        return {}
    since = int(state["cur_iter"]) - int(state["last_overflow_iter"]) - 2
    return {
        "scale": float(state["cur_scale"]),
        "hysteresis_left": 1,
        "steps_since_change": max(since, 0) % int(state["scale_window"]),
    }
