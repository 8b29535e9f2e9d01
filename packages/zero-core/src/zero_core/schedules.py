"""Learning-rate schedules: the engine's protocol, DeepSpeed's warm-ups, and schedules by name.

[Note: the count]
``last_batch_iteration`` is the index of the last optimizer step that the schedule has counted: -1
at construction, then 0, 1, ... with each call of ``step``, which follows the optimizer's step. The
first training step uses the rates of count -1, the second those of count 0.
"""

from __future__ import annotations

import inspect
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import lr_scheduler

from zero_core.errors import ConfigError
from zero_core.parts import load_part

_log = logging.getLogger(__name__)

Rate = float | Tensor


@runtime_checkable
class Schedule(Protocol):
    """Learning-rate schedule of torch.optim.lr_scheduler or of this package."""

    def step(self) -> None:
        """Set the rates of the next optimizer step. Called after each step that was taken."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as values that JSON can represent."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""


class ScheduleFactory(Protocol):
    """Function that makes a schedule for an optimizer."""

    def __call__(self, optimizer: torch.optim.Optimizer, /) -> Schedule:
        """Return a schedule that sets the rates of ``optimizer``."""


class IterationSchedule(ABC):
    """Base class of DeepSpeed's schedules. Rates depend only on a count: see [Note: the count].

    Not a subclass of torch's LRScheduler. That class counts differently, adds a key to the
    optimizer's groups, and warns about DeepSpeed's interface: ``step(count)`` and ``get_lr()``.

    Args:
        optimizer: a torch optimizer, or an object with a torch optimizer as ``optimizer``.
        last_batch_iteration: the count to resume from. If not -1, the constructor sets no rates.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[Rate] | None = None

    @abstractmethod
    def get_lr(self) -> list[Any]:
        """Return the rate of each group at ``last_batch_iteration``."""

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance to the next iteration, or to the given one, and set its rates."""
        following = self.last_batch_iteration + 1
        given = last_batch_iteration
        self.last_batch_iteration = following if given is None else given
        self._last_lr = set_rates(self.optimizer.param_groups, self.get_lr())

    def get_last_lr(self) -> list[Rate]:
        """Return the rates that were set last."""
        if self._last_lr is None:
            raise AssertionError("need to call step() first: no rate has been set yet")
        return self._last_lr

    def state_dict(self) -> dict[str, Any]:
        """Return the count. The optimizer's groups hold the rates."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the count, and read the last rates from the optimizer's groups."""
        self.last_batch_iteration = self.count_in(state_dict)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def count_in(self, saved: Mapping[str, Any]) -> int:
        """Return the count of a saved state. torch's ``last_epoch`` is the count + 1."""
        for key, ahead in (("last_batch_iteration", 0), ("last_epoch", 1)):
            if key in saved:
                return int(saved[key]) - ahead
        raise ValueError(
            f"{type(self).__name__} needs 'last_batch_iteration', the state has only "
            f"{sorted(saved)}"
        )


class WarmupLR(IterationSchedule):
    """Warm-up from ``warmup_min_lr`` to ``warmup_max_lr``, then constant.

    With count ``0 <= k < W`` of ``W`` warm-up steps, the rate has risen by the fraction ``k / W``
    ("linear") or ``log(k + 1) / log(W)`` ("log").

    Args, in addition to those of `IterationSchedule`:
        warmup_min_lr: rate of the first step, one for all groups or a list.
        warmup_max_lr: rate after the warm-up. None: each group's own rate.
        warmup_num_steps: number of warm-up steps. 0 and 1 count as 2.
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
        super().__init__(optimizer, last_batch_iteration)
        if warmup_type not in ("log", "linear"):
            text = "warmup_type = %r is neither 'log' nor 'linear': 'log' is taken, as by DeepSpeed"
            _log.warning(text, warmup_type)
            warmup_type = "log"
        # At least 2, because `_part` divides by the logarithm, and log(1) is 0.
        self.warmup_num_steps = max(2, whole("warmup_num_steps", warmup_num_steps, least=0))
        self.warmup_type = warmup_type
        self.min_lrs = per_group(self.optimizer, "warmup_min_lr", warmup_min_lr)
        if warmup_max_lr is None:  # clone tensor rates, which are set in place
            own = [group["lr"] for group in self.optimizer.param_groups]
            self.max_lrs = [rate.clone() if isinstance(rate, Tensor) else rate for rate in own]
        else:
            self.max_lrs = per_group(self.optimizer, "warmup_max_lr", warmup_max_lr)
        if last_batch_iteration == -1:
            self.step(-1)

    def get_lr(self) -> list[Any]:
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        part = self._part()
        bounds = zip(self.min_lrs, self.max_lrs, strict=True)
        return [low + (high - low) * part for low, high in bounds]

    def _part(self) -> float:
        """Return the fraction from the lowest to the highest rate, for a count >= 0."""
        count, num_steps = self.last_batch_iteration, self.warmup_num_steps
        if count >= num_steps:
            return 1.0
        if self.warmup_type == "log":
            return 1.0 / math.log(num_steps) * math.log(count + 1)
        return count / num_steps


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then a linear decay to ``warmup_min_lr`` at count ``total_num_steps``."""

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
        warmup = (warmup_num_steps, warmup_type, last_batch_iteration)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, *warmup)
        if total_num_steps < self.warmup_num_steps:
            _log.warning(
                f"{type(self).__name__}: total_num_steps {total_num_steps} is less than "
                f"warmup_num_steps {self.warmup_num_steps}: the warm-up is not completed"
            )

    def _part(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return super()._part()
        left = float(self.total_num_steps - self.last_batch_iteration)
        return max(0.0, left / float(max(1.0, self.total_num_steps - self.warmup_num_steps)))


class WarmupCosineLR(WarmupDecayLR):
    """Warm-up of each group's own rate, then decay along half a cosine.

    Args (the others are as in `WarmupLR`):
        total_num_steps: count + 1 at the end of the cosine.
        warmup_min_ratio: factor on the rates at count 0. At count -1 the factor is 0.
        cos_min_ratio: factor from the end of the cosine on.
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
        check_finite("warmup_min_ratio", warmup_min_ratio)
        check_finite("cos_min_ratio", cos_min_ratio)
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        warmup = (warmup_num_steps, warmup_type, last_batch_iteration)
        super().__init__(optimizer, total_num_steps, 0.0, None, *warmup)
        self.org_lrs = self.max_lrs

    def get_lr_ratio(self) -> float:
        return 0.0 if self.last_batch_iteration < 0 else self._part()

    def _part(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return self.warmup_min_ratio + super()._part() * (1.0 - self.warmup_min_ratio)
        num_steps = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (self.last_batch_iteration - self.warmup_num_steps + 1) / num_steps)
        half_cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * half_cosine)


SCHEDULERS: Mapping[str, type[IterationSchedule]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
"""DeepSpeed's warm-ups, by their names in the configuration."""

_OF_ZERO_ENGINE = ("LRRangeTest", "OneCycle")
"""DeepSpeed's other schedules, which are entry points of the package zero-parts."""

_GIVEN = "pass lr_scheduler=... to build()"
_NEEDS_OBJECTS = {
    "LambdaLR": f"it takes functions; {_GIVEN}",
    "MultiplicativeLR": f"it takes functions; {_GIVEN}",
    "ChainedScheduler": f"it takes other schedulers; {_GIVEN}",
    "SequentialLR": f"it takes other schedulers; {_GIVEN}",
    "ReduceLROnPlateau": "its step takes a measured value; make it over engine.optimizer after "
    "build(), and call its step(value) after engine.step()",
}
"""Schedules of torch that a configuration cannot describe, with the reason and the cure."""


def make_scheduler(
    optimizer: torch.optim.Optimizer, name: str, params: Mapping[str, Any]
) -> Schedule:
    """Make the schedule ``name``, a schedule of DeepSpeed or a scheduler class of torch."""
    factory: Callable[..., Schedule]
    found = getattr(lr_scheduler, name, None)
    base = lr_scheduler.LRScheduler
    if name in SCHEDULERS:
        factory = SCHEDULERS[name]
    elif name in _OF_ZERO_ENGINE:
        asked = f"scheduler.type = {name!r}"
        factory = load_part("zero_core.schedules", name, asked_by=asked, distribution="zero-parts")
    elif name in _NEEDS_OBJECTS:
        raise ConfigError(
            f"scheduler.type = {name!r} cannot be given in a configuration: {_NEEDS_OBJECTS[name]}"
        )
    elif isinstance(found, type) and issubclass(found, base) and found is not base:
        factory = found
    else:
        known = sorted([*SCHEDULERS, *_OF_ZERO_ENGINE])
        raise ConfigError(
            f"scheduler.type = {name!r} is not served; known: {known}, and any class "
            "of torch.optim.lr_scheduler, spelled as there"
        )
    known = [p for p in inspect.signature(factory).parameters if p != "optimizer"]
    unknown = sorted(set(params) - set(known))
    if unknown:
        raise ConfigError(f"scheduler.params.{unknown[0]}: unknown key; {name} takes {known}")
    try:
        return factory(optimizer, **params)
    except (TypeError, ValueError) as error:
        # Errors of the project's own schedules begin with the parameter's name.
        is_named = str(error).partition(" ")[0].rstrip(":") in known
        raise ConfigError(f"scheduler.params{'.' if is_named else ': '}{error}") from error


_PARTS = "_schedulers"
"""State-dict key of the inner schedulers in torch's SequentialLR and ChainedScheduler."""


def count_of(schedule: Schedule) -> int | None:
    """Return how often ``schedule`` was stepped, up to a constant, or None if it has no count."""
    if isinstance(schedule, IterationSchedule):
        return schedule.last_batch_iteration
    while isinstance(schedule, lr_scheduler.ChainedScheduler):  # it has no count of its own
        schedule = schedule._schedulers[0]
    return schedule.last_epoch if isinstance(schedule, lr_scheduler.LRScheduler) else None


def check_state(schedule: Schedule, saved: Mapping[str, Any]) -> None:
    """Raise ValueError if ``schedule`` cannot resume from ``saved``, before anything changes."""
    if isinstance(schedule, IterationSchedule):
        schedule.count_in(saved)
    else:
        _check_alike(type(schedule).__name__, schedule.state_dict(), saved)


def _check_alike(kind: str, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise ValueError for missing public keys or inner schedules, and for other list lengths."""
    needed = {k for k in own if not k.startswith("_") or k == _PARTS}
    missing = sorted(needed - saved.keys())
    if missing:
        raise ValueError(f"{kind} needs {missing[0]!r}, the state has only {sorted(saved)}")
    for key in ("base_lrs", "_last_lr", _PARTS):
        if key in own and key in saved and len(own[key]) != len(saved[key]):
            raise ValueError(f"{kind} has {len(own[key])} {key}, the state {len(saved[key])}")
    for number, mine in enumerate(own.get(_PARTS, ())):
        _check_alike(f"{kind}'s schedule {number}", mine, saved[_PARTS][number])


def resume_rates(schedule: Schedule) -> None:
    """Set the optimizer's rates from ``schedule``, which was loaded without the optimizer."""
    if isinstance(schedule, IterationSchedule):
        if schedule.last_batch_iteration >= 0:  # a new engine already has the rates of count -1
            schedule.step(schedule.last_batch_iteration)
    elif isinstance(schedule, lr_scheduler.LRScheduler):
        set_rates(schedule.optimizer.param_groups, schedule.get_last_lr())


def set_rates(groups: Sequence[dict[str, Any]], rates: Sequence[Rate]) -> list[Rate]:
    """Set each group's rate, in place if it is a tensor, and return the groups' rates."""
    for group, rate in zip(groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate.squeeze() if isinstance(rate, Tensor) else rate)
        else:
            group["lr"] = rate
    return [group["lr"] for group in groups]


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return ``optimizer`` if it is a torch optimizer, else its attribute ``optimizer``."""
    # foreign: wrappers of Accelerate and of mixed-precision libraries have this attribute
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(candidate, torch.optim.Optimizer):
            return candidate
    raise TypeError(
        f"a schedule needs a torch.optim.Optimizer, or an object whose attribute 'optimizer' is "
        f"one; found {type(optimizer).__name__}"
    )


def per_group(optimizer: torch.optim.Optimizer, name: str, value: Any) -> list[Any]:
    """Return one value per group: ``value`` for each, or the items of a list."""
    num_groups = len(optimizer.param_groups)
    values = list(value) if isinstance(value, list | tuple) else [value] * num_groups
    check_finite(name, *values)
    if len(values) != num_groups:
        raise ValueError(f"{name}: {len(values)} values for {num_groups} parameter groups")
    return values


def check_finite(name: str, *values: Any) -> None:
    """Raise ValueError for values that are not finite numbers."""
    for value in values:
        is_number = isinstance(value, int | float | Tensor) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, found {value!r}")


def whole(name: str, value: Any, *, least: int) -> int:
    """Return a whole number as an int. JSON may write 1000 as 1e3, a float."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    is_whole = is_int or (isinstance(value, float) and value.is_integer())
    if not is_whole or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, found {value!r}")
    return int(value)
