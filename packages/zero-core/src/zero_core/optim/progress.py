"""Check of a training's saved progress, without torch unless a value is a tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from zero_core.errors import CheckpointCorruptError

_FINITE = frozenset({"lr", "betas", "eps", "weight_decay", "momentum"})
"""Settings that must be finite. Others, such as Prodigy's ``growth_rate``, may be infinite."""


def is_finite_setting(key: str, value: object) -> bool:
    """Whether ``value`` has no NaN, and no infinity if `_FINITE` contains ``key``."""
    if not isinstance(value, int | float | str | list | tuple | dict | None):
        from torch import Tensor

        if isinstance(value, Tensor):
            value = value.reshape(-1).tolist() if value.is_cpu else []  # avoid a device sync
    numbers = value if isinstance(value, tuple | list) else (value,)
    is_wrong = math.isnan if key not in _FINITE else lambda number: not math.isfinite(number)
    return not any(is_wrong(number) for number in numbers if isinstance(number, float))


def check_progress(saved: Mapping[str, Any]) -> None:
    """Raise CheckpointCorruptError if `TrainState.state_dict` cannot have returned ``saved``."""
    for name in ("global_steps", "micro_steps", "skipped_steps"):
        if not _is_count(saved.get(name)):
            raise CheckpointCorruptError(f"progress.{name} is {saved.get(name)!r:.100}")
    scaler = saved.get("loss_scaler")
    is_scale = isinstance(scaler, Mapping) and (
        not scaler
        or (
            isinstance(scaler.get("scale"), int | float)
            and 0 < scaler["scale"] < math.inf
            and all(_is_count(scaler.get(n)) for n in ("hysteresis_left", "steps_since_change"))
        )
    )
    if not is_scale:
        raise CheckpointCorruptError(f"progress.loss_scaler is {scaler!r:.200}")
    if "lr_scheduler" not in saved or not isinstance(saved.get("param_groups"), list):
        raise CheckpointCorruptError("progress has no lr_scheduler, or param_groups are no list")
    for number, group in enumerate(saved["param_groups"]):
        where = f"progress.param_groups.{number}"
        if not isinstance(group, Mapping) or "params" in group:
            raise CheckpointCorruptError(f"{where} is no group of hyperparameters")
        for key, value in group.items():
            if not isinstance(key, str) or not is_finite_setting(key, value):
                raise CheckpointCorruptError(f"{where}.{key} is {value!r:.100}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
