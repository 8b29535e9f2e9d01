"""DeepSpeed's warm-up schedules: up, then constant, linearly down, or down half a cosine.

The curves are DeepSpeed's value for value. With ``k`` the count (see
zero_core.optim.schedules.base), ``W`` the steps of the warm-up and ``T`` all steps, the way up is
``log(k + 1) / log(W)`` or ``k / W``.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from zero_core.optim.schedules.base import IterationSchedule, check_finite, per_group, whole

_log = logging.getLogger(__name__)


class _Warmup(IterationSchedule):
    """Base of schedules with a warm-up from 0 to 1."""

    def __init__(
        self, optimizer: Any, warmup_num_steps: int, warmup_type: str, last_batch_iteration: int
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if warmup_type not in ("log", "linear"):
            text = "warmup_type = %r is neither 'log' nor 'linear': 'log' is taken, as by DeepSpeed"
            _log.warning(text, warmup_type)
            warmup_type = "log"
        # At least 2: the logarithm of 1 is 0.
        self.warmup_num_steps = max(2, whole("warmup_num_steps", warmup_num_steps, least=0))
        self.warmup_type = warmup_type
        self._inverse_log = 1.0 / math.log(self.warmup_num_steps)

    def _start(self) -> None:
        """Set the rates of the first optimizer step, unless the schedule resumes."""
        if self.last_batch_iteration == -1:
            self._set(self.get_lr())

    def _way_up(self) -> float:
        """Return the part of the warm-up, from 0 to 1, for ``0 <= k < W``."""
        if self.warmup_type == "log":
            return self._inverse_log * math.log(self.last_batch_iteration + 1)
        return self.last_batch_iteration / self.warmup_num_steps

    def _warn_if_short(self, total_num_steps: int) -> None:
        if total_num_steps < self.warmup_num_steps:
            _log.warning(
                "%s: total_num_steps %s is less than warmup_num_steps %s: the warm-up is not "
                "completed",
                type(self).__name__,
                total_num_steps,
                self.warmup_num_steps,
            )


class WarmupLR(_Warmup):
    """Warm-up from ``warmup_min_lr`` to ``warmup_max_lr``, then constant.

    Args, besides those of `IterationSchedule`:
        warmup_min_lr: rate of the first step; one for all groups or a list.
        warmup_max_lr: rate after the warm-up; None: each group's own.
        warmup_num_steps: steps of the warm-up; 0 and 1 count as 2.
        warmup_type: "log" or "linear".
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        highest = _own_rates(self.optimizer) if warmup_max_lr is None else warmup_max_lr
        self.min_lrs = per_group(self.optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs = per_group(self.optimizer, "warmup_max_lr", highest)
        self._spans = [high - low for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        self._start()

    def get_lr(self) -> list[Any]:
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        is_warming = self.last_batch_iteration < self.warmup_num_steps
        part = self._way_up() if is_warming else self._part_after()
        return [low + span * part for low, span in zip(self.min_lrs, self._spans, strict=True)]

    def _part_after(self) -> float:
        """Return the factor on the span after the warm-up, for ``k >= W``."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """`WarmupLR` with a linear decay to ``warmup_min_lr`` at ``total_num_steps``.

    ``warmup_max_lr`` is 0.001 unless it is given; None is each group's own rate.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: float | list[float] = 0.0,
        warmup_max_lr: float | list[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        check_finite("total_num_steps", total_num_steps)
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )
        self._warn_if_short(total_num_steps)

    def _part_after(self) -> float:
        left = float(self.total_num_steps - self.last_batch_iteration)
        return max(0.0, left / float(max(1.0, self.total_num_steps - self.warmup_num_steps)))


class WarmupCosineLR(_Warmup):
    """Warm-up of each group's own rate, then decay along half a cosine.

    Args, besides those of `IterationSchedule`:
        total_num_steps: end of the cosine, from which the factor is ``cos_min_ratio``.
        warmup_min_ratio: the factor at iteration 0; the first step of all has factor 0.
        warmup_num_steps: steps of the warm-up; 0 and 1 count as 2.
        cos_min_ratio: the factor at the end.
        warmup_type: "log" or "linear".
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        check_finite("total_num_steps", total_num_steps)
        check_finite("warmup_min_ratio", warmup_min_ratio)
        check_finite("cos_min_ratio", cos_min_ratio)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self.org_lrs = _own_rates(self.optimizer)
        self._warn_if_short(total_num_steps)
        self._start()

    def get_lr_ratio(self) -> float:
        if self.last_batch_iteration < 0:
            return 0.0
        if self.last_batch_iteration < self.warmup_num_steps:
            return self.warmup_min_ratio + self._way_up() * (1.0 - self.warmup_min_ratio)
        num_steps = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (self.last_batch_iteration - self.warmup_num_steps + 1) / num_steps)
        half_cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * half_cosine)

    def get_lr(self) -> list[Any]:
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]


def _own_rates(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return copies of the groups' rates, since a rate that is a tensor is set in place."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]
