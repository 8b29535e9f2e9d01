"""Stands for ``deepspeed.monitor``: where scalars go; see `zero_engine.monitoring`."""

from __future__ import annotations

from zero_engine.deepspeed.monitor import config, monitor

__all__ = ["config", "monitor"]
