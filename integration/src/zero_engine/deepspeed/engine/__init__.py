"""`DeepSpeedEngine` and its parts."""

from zero_engine.deepspeed.engine.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
