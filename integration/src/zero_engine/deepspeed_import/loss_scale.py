"""DeepSpeed's dynamic loss scales, as `zero_core.optim.train_state.LossScaler` keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_engine.deepspeed_import.torch_files import Record


def of_zero(state: Mapping[str, Any]) -> dict[str, float]:
    """Return the scale of a ZeRO optimizer's state: empty if it is constant."""
    scaler = state.get("loss_scaler")
    if not state.get("dynamic_loss_scale") or not isinstance(scaler, Record):
        return {}
    return _scale(vars(scaler))


def of_stage_0(state: Mapping[str, Any]) -> dict[str, float]:
    """Return the scale of a 16-bit optimizer's state without ZeRO: empty if it is constant."""
    return _scale(state) if state.get("dynamic_loss_scale") else {}


def _scale(found: Mapping[str, Any]) -> dict[str, float]:
    return {
        "scale": float(found["cur_scale"]),
        "hysteresis_left": int(found.get("cur_hysteresis", 1)),
        "steps_since_change": int(found["cur_iter"]) - int(found["last_overflow_iter"]) - 1,
    }
