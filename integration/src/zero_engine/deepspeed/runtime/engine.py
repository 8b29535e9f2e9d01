"""``deepspeed.runtime.engine``."""

from zero_engine.deepspeed.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
