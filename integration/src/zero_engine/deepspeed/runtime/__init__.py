"""The parts of ``deepspeed.runtime`` that scripts import."""

from __future__ import annotations

from zero_engine.deepspeed.runtime import lr_schedules

__all__ = ["lr_schedules"]
