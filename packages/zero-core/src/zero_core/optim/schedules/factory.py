"""Learning-rate schedules by name: DeepSpeed's, and those of torch.optim.lr_scheduler.

DeepSpeed's names are the classes of `zero_core.optim.schedules.warmup`, and OneCycle and
LRRangeTest of zero-engine, whose parameters and values are DeepSpeed's. Any other name is a class
of torch.optim.lr_scheduler, spelled as there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

import torch
from torch.optim import lr_scheduler

from zero_core.errors import ConfigError, MissingPartError
from zero_core.optim.schedules.base import IterationSchedule, Schedule
from zero_core.optim.schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "SCHEDULERS",
    "IterationSchedule",
    "Schedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "make_scheduler",
]

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
