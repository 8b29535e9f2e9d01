"""Old names and short forms of DeepSpeed's keys, brought to today's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zero_core.errors import ConfigError

_ZERO = "zero_optimization"
_OWN_AUTO = f"{_ZERO}.offload_optimizer.ratio"
"""Where "auto" is a value of zero-core's own: the fastest ratio that fits."""

_STAGE3 = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
"""Keys that DeepSpeed takes with and without ``stage3_``."""

_RENAMED = {
    **{key: f"stage3_{key}" for key in _STAGE3},
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}

Tell = Callable[[str, Any, str], None]
"""Takes note of a key, its value, and what became of it."""


def without_auto(block: Mapping[str, Any], tell: Tell, path: str = "") -> dict[str, Any]:
    """Return ``block`` without nulls and without unfilled "auto": both mean the default."""
    kept: dict[str, Any] = {}
    for key, value in block.items():
        where = f"{path}{key}"
        if isinstance(value, Mapping):
            kept[key] = without_auto(value, tell, f"{where}.")
        elif value == "auto" and where != _OWN_AUTO:
            tell(where, value, "nothing filled it in: the default holds")
        elif value is not None:
            kept[key] = value
    return kept


def modernise(config: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Return ``config`` with today's names. ``config`` itself is not changed.

    Raises:
        ConfigError: an old name and its new one are both there.
    """
    new = dict(config)
    if "bfloat16" in new:
        _rename(new, "bfloat16", "bf16", tell)
    zero = new.get(_ZERO)
    if isinstance(zero, bool):
        tell(_ZERO, zero, f"an old form: {_ZERO}.stage = {int(zero)}")
        new[_ZERO] = {"stage": int(zero)}
    elif isinstance(zero, Mapping):
        new[_ZERO] = _modern_zero(dict(zero), tell)
    if isinstance(new.get("communication_data_type"), str):
        new["communication_data_type"] = new["communication_data_type"].lower()
    return new


def _modern_zero(zero: dict[str, Any], tell: Tell) -> dict[str, Any]:
    for old, name in _RENAMED.items():
        if old in zero:
            _rename(zero, old, name, tell, f"{_ZERO}.")
    pins = zero.pop("cpu_offload_use_pin_memory", None)
    for old, name in _OFFLOAD.items():
        if old in zero:
            _offload(zero, old, name, pins, tell)
    if pins is not None:
        tell(f"{_ZERO}.cpu_offload_use_pin_memory", pins, "an old key: pin_memory of the offload")
    if zero.get("zero_hpz_partition_size") == 0:
        zero["zero_hpz_partition_size"] = 1  # DeepSpeed's other way to say that there are none
    return zero


def _offload(zero: dict[str, Any], old: str, name: str, pins: bool | None, tell: Tell) -> None:
    is_on = zero.pop(old)
    tell(f"{_ZERO}.{old}", is_on, f"an old key: {_ZERO}.{name}.device")
    if not isinstance(is_on, bool):
        raise ConfigError(f"{_ZERO}.{old}: expected true or false, found {is_on!r}")
    if not is_on:
        return
    if name in zero:
        raise ConfigError(f"{_ZERO}.{old} and {_ZERO}.{name} say the same: give the latter")
    zero[name] = {"device": "cpu", **({} if pins is None else {"pin_memory": pins})}


def _rename(block: dict[str, Any], old: str, name: str, tell: Tell, where: str = "") -> None:
    if name in block:
        raise ConfigError(f"{where}{old} and {where}{name} are the same key: give the latter")
    block[name] = block.pop(old)
    tell(f"{where}{old}", block[name], f"another name of {where}{name}")
