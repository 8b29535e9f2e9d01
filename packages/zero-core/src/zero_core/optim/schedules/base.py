"""Learning-rate schedules: the engine's protocol, and the base class of DeepSpeed's schedules.

[Note: the count]
``last_batch_iteration`` is the index of the last optimizer step that the schedule has counted: -1
at construction, then 0, 1, ... with each call of ``step``, which follows the optimizer's. The first
step of a training runs at the rates of -1, and the second at those of 0.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

Rate = float | Tensor


class Schedule(Protocol):
    """Schedule as the engine uses it: of torch.optim.lr_scheduler or of this package."""

    def step(self) -> None:
        """Set the rates of the next optimizer step. Called after each step that was taken."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps, as JSON."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""


class ScheduleFactory(Protocol):
    """Maker of a schedule, such as a class of torch.optim.lr_scheduler with its arguments bound."""

    def __call__(self, optimizer: torch.optim.Optimizer, /) -> Schedule:
        """Make the schedule of ``optimizer``, whose rates it may set."""


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
    elif isinstance(schedule, LRScheduler):
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
