"""Arguments for the one scheduler step that `DeepSpeedEngine.step` makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_core import Engine

__all__ = ["Arguments"]


class Arguments:
    """Within, the scheduler's ``step`` gets ``arguments``: ReduceLROnPlateau's metric, say."""

    def __init__(self, core: Engine, arguments: Mapping[str, Any]) -> None:
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
