"""The 1cycle policy, and the range test that finds its bounds, with DeepSpeed's values.

Smith, 2018 (arXiv 1803.09820): sections 3 and 4. In the formulas below, ``b`` is
``last_batch_iteration + 1``.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from zero_core.schedules import IterationSchedule, check_finite, per_group, set_rates, whole

_log = logging.getLogger(__name__)

_BETA2 = 0.99
"""Second beta of every group while momentum is cycled."""


class LRRangeTest(IterationSchedule):
    """Rising rates, to find where the loss diverges.

    ``lr = min_lr * (1 + step_rate * b / step_size)``. With ``lr_range_test_staircase``, ``b /
    step_size`` is rounded down. ``min_lr`` is one rate for all groups or a list.
    """

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: float | list[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = per_group(self.optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = whole("lr_range_test_step_size", lr_range_test_step_size, least=1)
        check_finite("lr_range_test_step_rate", lr_range_test_step_rate)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._last_lr = set_rates(self.optimizer.param_groups, self.min_lr)

    def get_lr(self) -> list[Any]:
        interval = float(self.last_batch_iteration + 1) / self.step_size
        factor = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [low * factor for low in self.min_lr]

    def step(self, batch_iteration: int | None = None) -> None:
        super().step(batch_iteration)


class OneCycle(IterationSchedule):
    """Rates rise and fall once while momentum falls and rises. Then rates fall and momentum rises.

    In the cycle, of ``A + B`` steps, ``lr = min + (max - min) * s`` and ``beta1 = max_mom -
    (max_mom - min_mom) * s``, where ``s`` rises from 0 to 1 in ``A`` steps and falls in ``B``. In
    step ``d`` after the cycle, ``lr = min / (1 + decay_lr_rate * d / decay_step_size)`` and ``beta1
    = max_mom * (1 + decay_mom_rate * d / decay_step_size)``. The second beta is 0.99. The first
    step uses ``min_lr`` and ``min_mom``.

    ``A`` is ``cycle_first_step_size`` and ``B`` is ``cycle_second_step_size``, by default ``A``.
    The second number of stairs is by default equal to the first. 0 or less means no stairs. A
    ``decay_step_size`` of 0 means no decay. Rates and momenta are one value for all groups or a
    list. Without betas in the optimizer, ``cycle_momentum`` has no effect except a warning.
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: float | list[float],
        cycle_max_lr: float | list[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | list[float] = 0.8,
        cycle_max_mom: float | list[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lrs = per_group(self.optimizer, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = per_group(self.optimizer, "cycle_max_lr", cycle_max_lr)
        if cycle_second_step_size is None:
            cycle_second_step_size = cycle_first_step_size
        if cycle_second_stair_count is None:
            cycle_second_stair_count = cycle_first_stair_count
        check_finite("decay_lr_rate", decay_lr_rate)
        check_finite("decay_mom_rate", decay_mom_rate)
        check_finite("decay_step_size", decay_step_size)
        check_finite("cycle_first_step_size", cycle_first_step_size)
        check_finite("cycle_second_step_size", cycle_second_step_size)
        if cycle_first_step_size <= 0:
            raise ValueError(
                f"cycle_first_step_size must be positive, found {cycle_first_step_size}"
            )
        if cycle_second_step_size < 0:
            raise ValueError(
                f"cycle_second_step_size must not be negative, found {cycle_second_step_size}"
            )
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.decay_step_size = decay_step_size
        self.first_step_size = float(cycle_first_step_size)
        self.second_step_size = float(cycle_second_step_size)
        self.total_size = self.first_step_size + self.second_step_size
        self.first_stair_count = cycle_first_stair_count
        self.second_stair_count = cycle_second_stair_count
        self.cycle_momentum = cycle_momentum and "betas" in self.optimizer.defaults
        if self.cycle_momentum:
            self._min_moms = per_group(self.optimizer, "cycle_min_mom", cycle_min_mom)
            self._max_moms = per_group(self.optimizer, "cycle_max_mom", cycle_max_mom)
        elif cycle_momentum:
            text = "%s has no betas, so momentum is not cycled (cycle_momentum = false says so)"
            _log.warning(f"OneCycle: {text}", type(self.optimizer).__name__)
        if last_batch_iteration == -1:
            set_rates(self.optimizer.param_groups, self.min_lrs)
            if self.cycle_momentum:
                self._set_betas([(low, _BETA2) for low in self._min_moms])

    def step(self, batch_iteration: int | None = None) -> None:
        """Advance to the next iteration, or to the given one, and set its rates and betas."""
        super().step(batch_iteration)
        momenta = self.get_mom()
        if momenta is not None:
            self._set_betas(momenta)

    def get_lr(self) -> list[Any]:
        if self.last_batch_iteration < self.total_size:
            part = self._part()
            bounds = zip(self.min_lrs, self.max_lrs, strict=True)
            return [low + (high - low) * part for low, high in bounds]
        factor = 1 + self._decay(self.decay_lr_rate)
        return [low / factor for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each group at ``last_batch_iteration``, or None if not cycled."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            part = self._part()
            bounds = zip(self._min_moms, self._max_moms, strict=True)
            return [(high - (high - low) * part, _BETA2) for low, high in bounds]
        factor = 1 + self._decay(self.decay_mom_rate)
        return [(high * factor, _BETA2) for high in self._max_moms]

    def _set_betas(self, betas: list[tuple[float, float]]) -> None:
        for group, pair in zip(self.optimizer.param_groups, betas, strict=True):
            group["betas"] = pair

    def _part(self) -> float:
        """Return ``s``: 0 at the cycle's ends and 1 at its top, rounded down to a stair."""
        position = self.last_batch_iteration + 1
        turns = 1.0 + position / self.total_size
        x, top = turns - math.floor(turns), self.first_step_size / self.total_size
        num_stairs = self.first_stair_count if x <= top else self.second_stair_count
        if num_stairs <= 0:
            return x / top if x <= top else (x - 1) / (top - 1)
        exact = position % self.total_size  # the rounded ``x`` could start a stair late
        if exact <= self.first_step_size:
            height = exact * num_stairs / self.first_step_size
        else:
            height = (self.total_size - exact) * num_stairs / self.second_step_size
        return math.floor(height) / num_stairs

    def _decay(self, rate: float) -> float:
        if self.decay_step_size == 0:
            return 0.0
        steps = self.last_batch_iteration - self.total_size + 1
        return rate * (steps / self.decay_step_size)
