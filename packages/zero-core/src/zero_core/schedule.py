"""What a learning-rate schedule is: what the engine asks of one, and the base of those by name.

[Note: the count]
``last_batch_iteration`` is the index of the last optimizer step that the schedule knows of: -1 when
it is made, then 0, 1, ... with each call of ``step``, which comes after the optimizer's. So the
first step of a training runs at the rates of -1, and the second at those of 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = [
    "IterationSchedule",
    "Rate",
    "Schedule",
    "check_state",
    "per_group",
    "set_rates",
    "torch_optimizer",
    "whole",
]

Rate = float | Tensor


class Schedule(Protocol):
    """What the engine asks of a schedule: those of torch.optim.lr_scheduler and of this package."""

    def step(self) -> None:
        """Set the rates for the next optimizer step; called after one that was taken."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; JSON."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        ...


class IterationSchedule(ABC):
    """A schedule whose rates are a function of its count alone; see [Note: the count].

    Attributes:
        optimizer: the torch optimizer whose groups it sets.
        last_batch_iteration: the count.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        """Schedule ``optimizer``, or the torch optimizer within it; sets no rate yet.

        Raises:
            TypeError: neither is one.
        """
        self.optimizer = torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[Rate] | None = None

    @abstractmethod
    def get_lr(self) -> list[Any]:
        """The rate of each group at ``last_batch_iteration``."""

    @abstractmethod
    def step(self) -> None:
        """Go to the next iteration and set its rates; after the optimizer's step."""

    def get_last_lr(self) -> list[Rate]:
        """The rates that were set last.

        Raises:
            AssertionError: "need to call step() first", which callers know DeepSpeed's by.
        """
        if self._last_lr is None:
            raise AssertionError("need to call step() first: no rate has been set yet")
        return self._last_lr

    def state_dict(self) -> dict[str, Any]:
        """The count; rates come back with the optimizer's groups."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the count; `get_last_lr` is then what the groups hold.

        ``last_epoch`` does as well: torch's count, which is one ahead of this one.

        Raises:
            ValueError: there is neither.
        """
        self.last_batch_iteration = _count_of(state_dict)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _advance(self, iteration: int | None) -> None:
        """Go to ``iteration``, by default the next, and set its rates."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if iteration is None else iteration
        )
        self._set(self.get_lr())

    def _set(self, rates: Sequence[Rate]) -> None:
        self._last_lr = set_rates(self.optimizer.param_groups, rates)


def check_state(schedule: Schedule, saved: Mapping[str, Any]) -> None:
    """Refuse a state that ``schedule`` cannot go on from, before anything is changed.

    Raises:
        ValueError: it lacks the count.
    """
    if isinstance(schedule, IterationSchedule):
        _count_of(saved)
    elif "last_epoch" in schedule.state_dict() and "last_epoch" not in saved:
        raise ValueError(f"its state has no 'last_epoch', only {sorted(saved)}")


def _count_of(saved: Mapping[str, Any]) -> int:
    """See [Note: the count]; what has stepped n times is at n - 1 here, at n in torch's terms."""
    if "last_batch_iteration" in saved:
        return int(saved["last_batch_iteration"])
    if "last_epoch" in saved:
        return int(saved["last_epoch"]) - 1
    raise ValueError(f"its state has no 'last_batch_iteration', only {sorted(saved)}")


def set_rates(groups: Sequence[dict[str, Any]], rates: Sequence[Rate]) -> list[Rate]:
    """Set each group's rate, in place where it is a tensor; what the groups then hold."""
    for group, rate in zip(groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate.squeeze() if isinstance(rate, Tensor) else rate)
        else:
            group["lr"] = rate
    return [group["lr"] for group in groups]


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """``optimizer`` itself, or the torch optimizer that is its attribute ``optimizer``.

    Raises:
        TypeError: neither is one.
    """
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(candidate, torch.optim.Optimizer):
            return candidate
    raise TypeError(
        f"a schedule needs a torch.optim.Optimizer, or an object whose attribute 'optimizer' is "
        f"one; found {type(optimizer).__name__}"
    )


def per_group(optimizer: torch.optim.Optimizer, name: str, value: Any) -> list[Any]:
    """``value`` for each group: the same for all, or a list with one for each.

    Raises:
        ValueError: a list of another length.
    """
    num_groups = len(optimizer.param_groups)
    if not isinstance(value, list | tuple):
        return [value] * num_groups
    if len(value) != num_groups:
        raise ValueError(f"{name}: {len(value)} values for {num_groups} parameter groups")
    return list(value)


def whole(name: str, value: Any, *, least: int) -> int:
    """``value`` as a whole number, which JSON may write as 1e3.

    Raises:
        ValueError: it is none, or less than ``least``.
    """
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not is_whole or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, found {value!r}")
    return int(value)
