"""Learning-rate schedules: the engine's protocol, DeepSpeed's warm-ups, and schedules by name.

[Note: the count]
``last_batch_iteration`` is the index of the last optimizer step that the schedule has counted: -1
at construction, then 0, 1, ... with each call of ``step``, which follows the optimizer's. The first
step of a training runs at the rates of -1, and the second at those of 0.

The curves are DeepSpeed's value for value. With ``k`` the count, ``W`` the steps of the warm-up and
``T`` all steps, the way up is ``log(k + 1) / log(W)`` or ``k / W``.
"""

from __future__ import annotations

import inspect
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import lr_scheduler

from zero_core.errors import ConfigError, MissingPartError

__all__ = [
    "SCHEDULERS",
    "IterationSchedule",
    "Schedule",
    "ScheduleFactory",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "check_finite",
    "check_state",
    "make_scheduler",
    "per_group",
    "resume_rates",
    "set_rates",
    "torch_optimizer",
    "whole",
]

_log = logging.getLogger(__name__)

Rate = float | Tensor


@runtime_checkable
class Schedule(Protocol):
    """Schedule as the engine uses it: of torch.optim.lr_scheduler or of this package."""

    def step(self) -> None:
        """Set the rates of the next optimizer step. Called after each step that was taken."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps, as JSON."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""


class ScheduleFactory(Protocol):
    """Function that makes a schedule of an optimizer."""

    def __call__(self, optimizer: torch.optim.Optimizer, /) -> Schedule:
        """Return a schedule that sets the rates of ``optimizer``."""


@runtime_checkable
class ResumableSchedule(Protocol):
    """Schedule that checks a saved state and restores its own rates."""

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a state that it cannot resume from, before anything is changed.

        Raises:
            ValueError: with what is missing.
        """

    def resume_rates(self) -> None:
        """Set the current rates, where only its own state was loaded."""


class IterationSchedule(ABC):
    """Base of schedules whose rates depend on [Note: the count] alone.

    A subclass takes further arguments, and raises ValueError for one that is wrong, by name.

    Args:
        optimizer: a torch optimizer, or an object that has one as ``optimizer``.
        last_batch_iteration: the count to resume from; other than -1, `step` sets the first rate.

    Raises:
        TypeError: ``optimizer`` is neither.
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
        self.last_batch_iteration = (
            following if last_batch_iteration is None else last_batch_iteration
        )
        self._set(self.get_lr())

    def get_last_lr(self) -> list[Rate]:
        """Return the rates that were set last.

        Raises:
            AssertionError: "need to call step() first", DeepSpeed's message.
        """
        if self._last_lr is None:
            raise AssertionError("need to call step() first: no rate has been set yet")
        return self._last_lr

    def state_dict(self) -> dict[str, Any]:
        """Return the count. The optimizer's groups hold the rates."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the count, and take the last rates from the groups.

        ``last_epoch``, torch's count, serves as well. It is one ahead of this one.

        Raises:
            ValueError: there is neither.
        """
        self.last_batch_iteration = self._count_of(state_dict)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        self._count_of(state_dict)

    def resume_rates(self) -> None:
        """See `ResumableSchedule`. A new engine has the rates of -1 already."""
        if self.last_batch_iteration >= 0:
            self.step(self.last_batch_iteration)

    def _count_of(self, saved: Mapping[str, Any]) -> int:
        """Return the saved count of [Note: the count]: n - 1 after n steps, n in torch's states."""
        if "last_batch_iteration" in saved:
            return int(saved["last_batch_iteration"])
        if "last_epoch" in saved:
            return int(saved["last_epoch"]) - 1
        raise ValueError(
            f"{type(self).__name__} needs 'last_batch_iteration', the state has only "
            f"{sorted(saved)}"
        )

    def _set(self, rates: Sequence[Rate]) -> None:
        self._last_lr = set_rates(self.optimizer.param_groups, rates)


def check_state(schedule: Schedule, saved: Mapping[str, Any]) -> None:
    """Refuse a state that ``schedule`` cannot resume from, before anything is changed.

    Raises:
        ValueError: it lacks what the schedule's own has, or is of another number of groups.
    """
    if isinstance(schedule, ResumableSchedule):
        schedule.check_state(saved)
    else:
        _check_alike(type(schedule).__name__, schedule.state_dict(), saved)


def _check_alike(kind: str, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Compare states. Names with an underscore differ between releases of torch and are skipped."""
    needed = {k for k in own if not k.startswith("_") or k == _PARTS}
    missing = sorted(needed - saved.keys())
    if missing:
        raise ValueError(f"{kind} needs {missing[0]!r}, the state has only {sorted(saved)}")
    for key in ("base_lrs", "_last_lr", _PARTS):
        if key in own and key in saved and len(own[key]) != len(saved[key]):
            raise ValueError(f"{kind} has {len(own[key])} {key}, the state {len(saved[key])}")
    for number, mine in enumerate(own.get(_PARTS, ())):
        _check_alike(f"{kind}'s schedule {number}", mine, saved[_PARTS][number])


_PARTS = "_schedulers"
"""Key of the parts' states in torch's SequentialLR and ChainedScheduler."""


def resume_rates(schedule: Schedule) -> None:
    """Set the current rates of ``schedule``, where only its own state was loaded.

    Rates belong to the optimizer's groups and are restored with its state.
    """
    if isinstance(schedule, ResumableSchedule):
        schedule.resume_rates()
    elif isinstance(schedule, lr_scheduler.LRScheduler):
        set_rates(schedule.optimizer.param_groups, schedule.get_last_lr())


def set_rates(groups: Sequence[dict[str, Any]], rates: Sequence[Rate]) -> list[Rate]:
    """Set each group's rate, in place where it is a tensor, and return what the groups hold."""
    for group, rate in zip(groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate.squeeze() if isinstance(rate, Tensor) else rate)
        else:
            group["lr"] = rate
    return [group["lr"] for group in groups]


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return ``optimizer`` itself, or the torch optimizer that is its attribute ``optimizer``.

    Raises:
        TypeError: neither is one.
    """
    # foreign: wrappers of Accelerate and of mixed-precision libraries have this attribute
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(candidate, torch.optim.Optimizer):
            return candidate
    raise TypeError(
        f"a schedule needs a torch.optim.Optimizer, or an object whose attribute 'optimizer' is "
        f"one; found {type(optimizer).__name__}"
    )


def per_group(optimizer: torch.optim.Optimizer, name: str, value: Any) -> list[Any]:
    """Return ``value`` for each group: the same for all, or the items of a list.

    Raises:
        ValueError: a list of another length, or a number that is not finite.
    """
    check_finite(name, *(value if isinstance(value, list | tuple) else [value]))
    num_groups = len(optimizer.param_groups)
    if not isinstance(value, list | tuple):
        return [value] * num_groups
    if len(value) != num_groups:
        raise ValueError(f"{name}: {len(value)} values for {num_groups} parameter groups")
    return list(value)


def check_finite(name: str, *values: Any) -> None:
    """Refuse values that are no finite numbers.

    Raises:
        ValueError: one is not.
    """
    for value in values:
        is_number = isinstance(value, int | float | Tensor) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, found {value!r}")


def whole(name: str, value: Any, *, least: int) -> int:
    """Return ``value`` as a whole number, which JSON may write as 1e3.

    Raises:
        ValueError: it is none, or less than ``least``.
    """
    is_int = isinstance(value, int) and not isinstance(value, bool)
    is_whole = is_int or (isinstance(value, float) and value.is_integer())
    if not is_whole or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, found {value!r}")
    return int(value)


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
    return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]


SCHEDULERS: Mapping[str, type[IterationSchedule]] = {
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
}
"""DeepSpeed's warm-ups, by their names in the configuration."""

_OF_ZERO_ENGINE = ("LRRangeTest", "OneCycle")
"""DeepSpeed's other schedules: entry points of that package."""

_NEEDS_OBJECTS = {
    "LambdaLR": "it takes functions",
    "MultiplicativeLR": "it takes functions",
    "ChainedScheduler": "it takes other schedulers",
    "SequentialLR": "it takes other schedulers",
    "ReduceLROnPlateau": "its step takes a measured value, which the engine does not have",
}
"""Of torch's, what a configuration cannot describe, and why."""


def make_scheduler(
    optimizer: torch.optim.Optimizer, name: str, params: Mapping[str, Any]
) -> Schedule:
    """Make the schedule that the configuration names.

    Raises:
        ConfigError: an unknown name or parameter, a missing one, or one that is out of range.
        MissingPartError: the schedule is zero-engine's, which is not installed.
    """
    factory = _find(name)
    known = [p for p in inspect.signature(factory).parameters if p != "optimizer"]
    unknown = sorted(set(params) - set(known))
    if unknown:
        raise ConfigError(f"scheduler.params.{unknown[0]}: unknown key; {name} takes {known}")
    try:
        return factory(optimizer, **params)
    except (TypeError, ValueError) as error:
        # The project's own schedules begin with the name.
        is_named = str(error).partition(" ")[0].rstrip(":") in known
        raise ConfigError(f"scheduler.params{'.' if is_named else ': '}{error}") from error


def _find(name: str) -> Callable[..., Schedule]:
    own = SCHEDULERS.get(name)
    if own is not None:
        return own
    if name in _OF_ZERO_ENGINE:
        for point in entry_points(group="zero_core.schedules", name=name):
            made: Callable[..., Schedule] = point.load()
            return made
        raise MissingPartError(
            f"scheduler.type = {name!r} needs the package zero-engine, which is not installed: "
            "pip install ./integration in a checkout"
        )
    if name in _NEEDS_OBJECTS:
        raise ConfigError(
            f"scheduler.type = {name!r} cannot be given in a configuration: "
            f"{_NEEDS_OBJECTS[name]}; pass lr_scheduler=... to build() or step it yourself"
        )
    found = getattr(lr_scheduler, name, None)
    base = lr_scheduler.LRScheduler
    if isinstance(found, type) and issubclass(found, base) and found is not base:
        return found
    known = sorted([*SCHEDULERS, *_OF_ZERO_ENGINE])
    raise ConfigError(
        f"scheduler.type = {name!r} is not served; known: {known}, and any class "
        "of torch.optim.lr_scheduler, spelled as there"
    )
