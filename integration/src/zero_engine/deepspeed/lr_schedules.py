"""``deepspeed.runtime.lr_schedules``: the schedules, their names, and their arguments."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from zero_core.schedules import WarmupCosineLR as WarmupCosineLR
from zero_core.schedules import WarmupDecayLR as WarmupDecayLR
from zero_core.schedules import WarmupLR as WarmupLR
from zero_core.schedules import set_rates, torch_optimizer
from zero_engine.deepspeed.one_cycle import LRRangeTest as LRRangeTest
from zero_engine.deepspeed.one_cycle import OneCycle as OneCycle

update_lr = set_rates
get_torch_optimizer = torch_optimizer

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
EDGE_VALUE = "edge_value"
MID_VALUE = "mid_value"
WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"
TOTAL_NUM_STEPS = "total_num_steps"

_RANGE_TEST_ARGUMENTS = {
    "lr_range_test_min_lr": (0.001, "rate of the first step"),
    "lr_range_test_step_rate": (1.0, "what each interval adds, in the first rate"),
    "lr_range_test_step_size": (1000, "training steps per interval"),
    "lr_range_test_staircase": (False, "count whole intervals alone"),
}
_CYCLE_ARGUMENTS = {
    "cycle_first_step_size": (1000, "training steps up"),
    "cycle_first_stair_count": (-1, "stairs on the way up"),
    "cycle_second_step_size": (-1, "training steps down"),
    "cycle_second_stair_count": (-1, "stairs on the way down"),
    "decay_step_size": (1000, "training steps per interval of the decay after the cycle"),
    "cycle_min_lr": (0.01, "lowest rate"),
    "cycle_max_lr": (0.1, "highest rate"),
    "decay_lr_rate": (0.0, "decay of the rate after the cycle"),
}
_MOMENTUM_ARGUMENTS = {
    "cycle_min_mom": (0.8, "lowest momentum"),
    "cycle_max_mom": (0.9, "highest momentum"),
    "decay_mom_rate": (0.0, "decay of the momentum after the cycle"),
}
_WARMUP_ARGUMENTS = {
    "warmup_min_lr": (0.0, "rate of the first step"),
    "warmup_max_lr": (0.001, "rate after the warm-up"),
    "warmup_num_steps": (1000, "training steps of the warm-up"),
    "warmup_type": (WARMUP_LOG_RATE, "'log' or 'linear'"),
}
_COSINE_ARGUMENTS = {
    "warmup_min_ratio": (0.01, "WarmupCosineLR: factor of the rate at the start"),
    "cos_min_ratio": (0.01, "WarmupCosineLR: factor of the rate at the end"),
}
_NAMES_OF: Mapping[str, tuple[str, ...]] = {
    LR_RANGE_TEST: (*_RANGE_TEST_ARGUMENTS,),
    ONE_CYCLE: (*_CYCLE_ARGUMENTS, *_MOMENTUM_ARGUMENTS),
    WARMUP_LR: (*_WARMUP_ARGUMENTS,),
    WARMUP_DECAY_LR: (*_WARMUP_ARGUMENTS,),
    WARMUP_COSINE_LR: ("warmup_num_steps", "warmup_type", *_COSINE_ARGUMENTS),
}
"""Parameters of each schedule that are tuning arguments."""
# DeepSpeed has a constant for each argument's name: CYCLE_MIN_LR = "cycle_min_lr".
globals().update({name.upper(): name for names in _NAMES_OF.values() for name in names})


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--lr_schedule`` and the schedules' parameters, with DeepSpeed's defaults."""
    group = parser.add_argument_group("Convergence Tuning", "Convergence tuning configurations")
    group.add_argument("--lr_schedule", type=str, help=f"one of {VALID_LR_SCHEDULES}")
    arguments: dict[str, tuple[Any, str]] = {
        **_RANGE_TEST_ARGUMENTS,
        **_CYCLE_ARGUMENTS,
        "cycle_momentum": (False, "cycle the momentum too"),
        **_MOMENTUM_ARGUMENTS,
        **_WARMUP_ARGUMENTS,
        **_COSINE_ARGUMENTS,
    }
    for name, (default, meaning) in arguments.items():
        if isinstance(default, bool):
            group.add_argument(f"--{name}", action="store_true", help=meaning)
        else:
            group.add_argument(f"--{name}", type=type(default), default=default, help=meaning)
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the process's tuning arguments, and its other arguments."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def override_params(args: Any, params: MutableMapping[str, Any]) -> None:
    """Copy values of all schedules' parameters from ``args`` into ``params``, unless None."""
    for names in _NAMES_OF.values():
        _override(args, params, names)


def _override(args: Any, params: MutableMapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        value = getattr(args, name, None)
        if value is not None:
            params[name] = value


def override_lr_range_test_params(args: Any, params: MutableMapping[str, Any]) -> None:
    """Do the same as `override_params`, for LRRangeTest only."""
    _override(args, params, _NAMES_OF[LR_RANGE_TEST])


def override_1cycle_params(args: Any, params: MutableMapping[str, Any]) -> None:
    """Do the same as `override_params`, for OneCycle only."""
    _override(args, params, _NAMES_OF[ONE_CYCLE])


def override_warmupLR_params(args: Any, params: MutableMapping[str, Any]) -> None:
    """Do the same as `override_params`, for WarmupLR and WarmupDecayLR only."""
    _override(args, params, _NAMES_OF[WARMUP_LR])


def override_warmupCosineLR_params(args: Any, params: MutableMapping[str, Any]) -> None:
    """Do the same as `override_params`, for WarmupCosineLR only."""
    _override(args, params, _NAMES_OF[WARMUP_COSINE_LR])


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """Return a ``scheduler`` block of tuning arguments, or None and the reason."""
    name = getattr(args, LR_SCHEDULE, None)
    if name is None:
        return None, f"--{LR_SCHEDULE} not specified on command line"
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not supported LR schedule"
    params: dict[str, Any] = {}
    _override(args, params, _NAMES_OF[name])
    return {"type": name, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[Any, str]:
    """Return a schedule's highest rate (LRRangeTest: its lowest), or None with the reason."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    name, params = config["type"], config["params"]
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not a valid LR schedule"
    if name == WARMUP_COSINE_LR:
        return None, f"{name} scales the optimizer's learning rate: its params define none"
    others = {LR_RANGE_TEST: "lr_range_test_min_lr", ONE_CYCLE: "cycle_max_lr"}
    return params[others.get(name, "warmup_max_lr")], ""
