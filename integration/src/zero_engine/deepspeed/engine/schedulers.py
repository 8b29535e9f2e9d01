"""Stand-ins for an engine's scheduler during a save, a load or a step with arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_core import ShardedModel
from zero_core.optim.schedules.base import check_state, resume_rates
from zero_engine.packing import pack, unpack

__all__ = ["PackedScheduler", "SteppedWith"]


class PackedScheduler:
    """A context in which ``core`` packs its scheduler's state by `zero_engine.packing`."""

    def __init__(self, core: ShardedModel) -> None:
        """Prepare."""
        self._core = core
        self._scheduler = core.lr_scheduler

    def __enter__(self) -> None:
        if self._scheduler is not None:
            self._core.lr_scheduler = self  # type: ignore[assignment]

    def state_dict(self) -> Any:
        """Called by the engine that saves."""
        assert self._scheduler is not None
        return pack(self._scheduler.state_dict(), "lr_scheduler")

    def check_state(self, state: Any) -> None:
        """Called before anything is loaded."""
        assert self._scheduler is not None
        check_state(self._scheduler, unpack(state))

    def resume_rates(self) -> None:
        """Called by the engine that loads no optimizer."""
        assert self._scheduler is not None
        resume_rates(self._scheduler)

    def load_state_dict(self, state: Any) -> None:
        """Called by the engine that loads."""
        assert self._scheduler is not None
        self._scheduler.load_state_dict(unpack(state))

    def __exit__(self, *error: object) -> None:
        self._core.lr_scheduler = self._scheduler


class SteppedWith:
    """A context in which the scheduler's ``step`` gets ``arguments``, such as a metric."""

    def __init__(self, core: ShardedModel, arguments: Mapping[str, Any]) -> None:
        """Prepare for one step of ``core``."""
        self._core = core
        self._scheduler = core.lr_scheduler
        self._arguments = dict(arguments)

    def __enter__(self) -> None:
        if self._scheduler is not None and self._arguments:
            self._core.lr_scheduler = self  # type: ignore[assignment]

    def step(self) -> None:
        """Called by the engine."""
        assert self._scheduler is not None
        self._scheduler.step(**self._arguments)

    def __exit__(self, *error: object) -> None:
        self._core.lr_scheduler = self._scheduler
