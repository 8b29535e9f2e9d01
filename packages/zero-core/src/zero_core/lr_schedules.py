"""DeepSpeed's learning-rate schedules by name, as torch.optim.lr_scheduler's.

The curves follow DeepSpeed's schedulers value for value: a warm-up, logarithmic or linear, then
constant, linear decay or half a cosine. Its count of iterations starts at -1: the first step runs
at the lowest rate, and so does the second.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from zero_core.errors import ConfigError

__all__ = ["SCHEDULERS", "make_scheduler"]

_Rate = float | Sequence[float]


def _warmup(iteration: int, num_steps: int, kind: str) -> float:
    """The part of the way up, from 0 to 1, at ``iteration`` < ``num_steps``."""
    if kind == "log":
        return math.log(iteration + 1) / math.log(num_steps)
    return iteration / num_steps


def _check(warmup_type: str, warmup_num_steps: int) -> int:
    if warmup_type not in ("log", "linear"):
        raise ConfigError(
            f"scheduler.params.warmup_type: expected 'log' or 'linear', found {warmup_type!r}"
        )
    if warmup_num_steps < 1:
        raise ConfigError(
            f"scheduler.params.warmup_num_steps: expected >= 1, found {warmup_num_steps}"
        )
    return max(2, warmup_num_steps)  # the logarithm of 1 is 0


def _between(
    optimizer: torch.optim.Optimizer,
    low: _Rate,
    high: _Rate | None,
    part_at: Callable[[int], float],
) -> LRScheduler:
    """Each group's rate goes from ``low`` to ``high`` (its own lr if None) as ``part_at`` says."""
    groups = optimizer.param_groups
    tops = [g["lr"] for g in groups] if high is None else _per_group(high, len(groups))
    bottoms = _per_group(low, len(groups))
    for group in groups:
        group["lr"] = group["initial_lr"] = 1.0  # the factors are the rates themselves

    def rate(bottom: float, top: float) -> Callable[[int], float]:
        return lambda step: bottom + (top - bottom) * (part_at(step - 1) if step > 0 else 0.0)

    return LambdaLR(optimizer, [rate(*pair) for pair in zip(bottoms, tops, strict=True)])


def _per_group(rate: _Rate, num_groups: int) -> list[float]:
    rates = [float(rate)] * num_groups if isinstance(rate, int | float) else list(rate)
    if len(rates) != num_groups:
        raise ConfigError(f"scheduler.params: {len(rates)} rates for {num_groups} parameter groups")
    return rates


def warmup_lr(
    optimizer: torch.optim.Optimizer,
    *,
    warmup_min_lr: _Rate = 0.0,
    warmup_max_lr: _Rate | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> LRScheduler:
    """``WarmupLR``: up to ``warmup_max_lr`` (default: the optimizer's lr), then constant."""
    num_steps = _check(warmup_type, warmup_num_steps)

    def part_at(iteration: int) -> float:
        return _warmup(iteration, num_steps, warmup_type) if iteration < num_steps else 1.0

    return _between(optimizer, warmup_min_lr, warmup_max_lr, part_at)


def warmup_decay_lr(
    optimizer: torch.optim.Optimizer,
    *,
    total_num_steps: int,
    warmup_min_lr: _Rate = 0.0,
    warmup_max_lr: _Rate | None = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> LRScheduler:
    """``WarmupDecayLR``: warm-up, then linearly down to ``warmup_min_lr``."""
    num_steps = _check(warmup_type, warmup_num_steps)

    def part_at(iteration: int) -> float:
        if iteration < num_steps:
            return _warmup(iteration, num_steps, warmup_type)
        return max(0.0, (total_num_steps - iteration) / max(1.0, total_num_steps - num_steps))

    return _between(optimizer, warmup_min_lr, warmup_max_lr, part_at)


def warmup_cosine_lr(
    optimizer: torch.optim.Optimizer,
    *,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
) -> LRScheduler:
    """``WarmupCosineLR``: warm-up, then half a cosine; both are factors of the optimizer's lr."""
    num_steps = _check(warmup_type, warmup_num_steps)

    def factor_at(step: int) -> float:
        iteration = step - 1
        if iteration < 0:
            return 0.0
        if iteration < num_steps:
            part = _warmup(iteration, num_steps, warmup_type)
            return warmup_min_ratio + part * (1.0 - warmup_min_ratio)
        progress = min(1.0, (iteration - num_steps + 1) / max(1, total_num_steps - num_steps))
        half_cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, cos_min_ratio + (1.0 - cos_min_ratio) * half_cosine)

    return LambdaLR(optimizer, factor_at)


SCHEDULERS: Mapping[str, Callable[..., LRScheduler]] = {
    "WarmupLR": warmup_lr,
    "WarmupDecayLR": warmup_decay_lr,
    "WarmupCosineLR": warmup_cosine_lr,
    "OneCycleLR": OneCycleLR,
}


def make_scheduler(
    optimizer: torch.optim.Optimizer, name: str, params: Mapping[str, Any]
) -> LRScheduler:
    """Make the schedule that the configuration names.

    Raises:
        ConfigError: an unknown name or parameter, or a missing one.
    """
    factory = SCHEDULERS.get(name)
    if factory is None:
        raise ConfigError(f"scheduler.type = {name!r} is not served; known: {sorted(SCHEDULERS)}")
    known = [p for p in inspect.signature(factory).parameters if p != "optimizer"]
    unknown = sorted(set(params) - set(known))
    if unknown:
        raise ConfigError(f"scheduler.params.{unknown[0]}: unknown key; {name} takes {known}")
    try:
        return factory(optimizer, **params)
    except TypeError as error:
        raise ConfigError(f"scheduler.params: {error}") from error
