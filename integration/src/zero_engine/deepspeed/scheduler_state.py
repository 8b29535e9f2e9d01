"""A scheduler's state with small tensors, a learning rate for example, kept as JSON."""

from __future__ import annotations

from typing import Any

from zero_core import Engine
from zero_core.schedule import check_state, resume_rates
from zero_engine.packing import pack, unpack

__all__ = ["PackedScheduler"]


class PackedScheduler:
    """Within, ``core`` saves and loads its scheduler's state by way of `zero_engine.packing`."""

    def __init__(self, core: Engine) -> None:
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
