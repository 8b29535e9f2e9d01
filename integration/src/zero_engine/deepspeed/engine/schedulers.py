"""Stand-ins for an engine's scheduler during a save, a load or a step with arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_core import ShardedModel
from zero_core.optim.schedules.base import check_state, resume_rates
from zero_engine.packing import pack, unpack


class _StandIn:
    """A context in which ``core`` has this object in the place of its scheduler, if it has one."""

    def __init__(self, core: ShardedModel) -> None:
        self._core = core
        self._scheduler: Any = core.lr_scheduler

    def __enter__(self) -> None:
        if self._scheduler is not None:
            self._core.lr_scheduler = self  # type: ignore[assignment]

    def __exit__(self, *error: object) -> None:
        self._core.lr_scheduler = self._scheduler


class PackedScheduler(_StandIn):
    """A context in which ``core`` packs its scheduler's state by `zero_engine.packing`."""

    def state_dict(self) -> Any:
        return pack(self._scheduler.state_dict(), "lr_scheduler")

    def check_state(self, state: Any) -> None:
        """Called before anything is loaded."""
        check_state(self._scheduler, unpack(state))

    def resume_rates(self) -> None:
        """Called by the engine that loads no optimizer."""
        resume_rates(self._scheduler)

    def load_state_dict(self, state: Any) -> None:
        self._scheduler.load_state_dict(unpack(state))


class SteppedWith(_StandIn):
    """A context in which the scheduler's ``step`` gets ``arguments``, such as a metric."""

    def __init__(self, core: ShardedModel, arguments: Mapping[str, Any]) -> None:
        super().__init__(core)
        self._arguments = arguments

    def step(self) -> None:
        self._scheduler.step(**self._arguments)
