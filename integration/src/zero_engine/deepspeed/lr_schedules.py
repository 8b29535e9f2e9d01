"""``deepspeed.runtime.lr_schedules``: the schedule classes, their names, and their arguments.

The configuration's ``scheduler`` block makes these classes too.
"""

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

LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"

EDGE_VALUE = "edge_value"
MID_VALUE = "mid_value"

CYCLE_FIRST_STEP_SIZE = "cycle_first_step_size"
CYCLE_FIRST_STAIR_COUNT = "cycle_first_stair_count"
CYCLE_SECOND_STEP_SIZE = "cycle_second_step_size"
CYCLE_SECOND_STAIR_COUNT = "cycle_second_stair_count"
DECAY_STEP_SIZE = "decay_step_size"

CYCLE_MIN_LR = "cycle_min_lr"
CYCLE_MAX_LR = "cycle_max_lr"
DECAY_LR_RATE = "decay_lr_rate"

CYCLE_MIN_MOM = "cycle_min_mom"
CYCLE_MAX_MOM = "cycle_max_mom"
DECAY_MOM_RATE = "decay_mom_rate"

WARMUP_MIN_LR = "warmup_min_lr"
WARMUP_MAX_LR = "warmup_max_lr"
WARMUP_NUM_STEPS = "warmup_num_steps"
WARMUP_TYPE = "warmup_type"
WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"

WARMUP_MIN_RATIO = "warmup_min_ratio"
COS_MIN_RATIO = "cos_min_ratio"

TOTAL_NUM_STEPS = "total_num_steps"

_RANGE_TEST_ARGUMENTS = (
    (LR_RANGE_TEST_MIN_LR, 0.001, "rate of the first step"),
    (LR_RANGE_TEST_STEP_RATE, 1.0, "what each interval adds, in the first rate"),
    (LR_RANGE_TEST_STEP_SIZE, 1000, "training steps per interval"),
    (LR_RANGE_TEST_STAIRCASE, False, "count whole intervals alone"),
)
_CYCLE_ARGUMENTS = (
    (CYCLE_FIRST_STEP_SIZE, 1000, "training steps up"),
    (CYCLE_FIRST_STAIR_COUNT, -1, "stairs on the way up"),
    (CYCLE_SECOND_STEP_SIZE, -1, "training steps down"),
    (CYCLE_SECOND_STAIR_COUNT, -1, "stairs on the way down"),
    (DECAY_STEP_SIZE, 1000, "training steps per interval of the decay after the cycle"),
    (CYCLE_MIN_LR, 0.01, "lowest rate"),
    (CYCLE_MAX_LR, 0.1, "highest rate"),
    (DECAY_LR_RATE, 0.0, "decay of the rate after the cycle"),
)
_MOMENTUM_ARGUMENTS = (
    (CYCLE_MIN_MOM, 0.8, "lowest momentum"),
    (CYCLE_MAX_MOM, 0.9, "highest momentum"),
    (DECAY_MOM_RATE, 0.0, "decay of the momentum after the cycle"),
)
_WARMUP_ARGUMENTS = (
    (WARMUP_MIN_LR, 0.0, "rate of the first step"),
    (WARMUP_MAX_LR, 0.001, "rate after the warm-up"),
    (WARMUP_NUM_STEPS, 1000, "training steps of the warm-up"),
    (WARMUP_TYPE, WARMUP_LOG_RATE, "'log' or 'linear'"),
)
_COSINE_ARGUMENTS = (
    (WARMUP_MIN_RATIO, 0.01, "WarmupCosineLR: factor of the rate at the start"),
    (COS_MIN_RATIO, 0.01, "WarmupCosineLR: factor of the rate at the end"),
)
_CYCLE_MOMENTUM_FLAG = ("cycle_momentum", False, "cycle the momentum too")


def _names(*tables: Iterable[tuple[str, object, str]]) -> tuple[str, ...]:
    return tuple(name for table in tables for name, _, _ in table)


_WARMUP_NAMES = _names(_WARMUP_ARGUMENTS)
_NAMES_OF: Mapping[str, tuple[str, ...]] = {
    LR_RANGE_TEST: _names(_RANGE_TEST_ARGUMENTS),
    ONE_CYCLE: _names(_CYCLE_ARGUMENTS, _MOMENTUM_ARGUMENTS),
    WARMUP_LR: _WARMUP_NAMES,
    WARMUP_DECAY_LR: _WARMUP_NAMES,
    WARMUP_COSINE_LR: (WARMUP_NUM_STEPS, WARMUP_TYPE, *_names(_COSINE_ARGUMENTS)),
}
"""Which arguments become parameters of which schedule."""


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--lr_schedule`` and the parameters of the schedules, with DeepSpeed's defaults."""
    group = parser.add_argument_group("Convergence Tuning", "Convergence tuning configurations")
    group.add_argument("--lr_schedule", type=str, help=f"one of {VALID_LR_SCHEDULES}")
    for name, default, meaning in (
        *_RANGE_TEST_ARGUMENTS,
        *_CYCLE_ARGUMENTS,
        _CYCLE_MOMENTUM_FLAG,
        *_MOMENTUM_ARGUMENTS,
        *_WARMUP_ARGUMENTS,
        *_COSINE_ARGUMENTS,
    ):
        if isinstance(default, bool):
            group.add_argument(f"--{name}", action="store_true", help=meaning)
        else:
            group.add_argument(f"--{name}", type=type(default), default=default, help=meaning)
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return this process's tuning arguments, and the rest of its command line."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def override_params(args: Any, params: MutableMapping[str, Any]) -> None:
    """Put every schedule's parameters that ``args`` has, and that aren't None, into ``params``."""
    for names in _NAMES_OF.values():
        _override(args, params, names)


def _override(args: Any, params: MutableMapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        value = getattr(args, name, None)
        if value is not None:
            params[name] = value


def override_lr_range_test_params(args: Any, params: MutableMapping[str, Any]) -> None:
    """Override ``params`` of LRRangeTest alone."""
    _override(args, params, _NAMES_OF[LR_RANGE_TEST])


def override_1cycle_params(args: Any, params: MutableMapping[str, Any]) -> None:
    """Override ``params`` of OneCycle alone."""
    _override(args, params, _NAMES_OF[ONE_CYCLE])


def override_warmupLR_params(args: Any, params: MutableMapping[str, Any]) -> None:
    """Override ``params`` of WarmupLR and WarmupDecayLR alone."""
    _override(args, params, _WARMUP_NAMES)


def override_warmupCosineLR_params(args: Any, params: MutableMapping[str, Any]) -> None:
    """Override ``params`` of WarmupCosineLR alone."""
    _override(args, params, _NAMES_OF[WARMUP_COSINE_LR])


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """Return a ``scheduler`` block of `add_tuning_arguments`' values, or None and the reason."""
    name = getattr(args, LR_SCHEDULE, None)
    if name is None:
        return None, f"--{LR_SCHEDULE} not specified on command line"
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not supported LR schedule"
    params: dict[str, Any] = {}
    _override(args, params, _NAMES_OF[name])
    return {"type": name, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the highest rate that a ``scheduler`` block names, or None and the reason."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    name, params = config["type"], config["params"]
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not a valid LR schedule"
    if name == WARMUP_COSINE_LR:
        return None, f"{name} scales the optimizer's learning rate: its params define none"
    others = {LR_RANGE_TEST: LR_RANGE_TEST_MIN_LR, ONE_CYCLE: CYCLE_MAX_LR}
    return params[others.get(name, WARMUP_MAX_LR)], ""
