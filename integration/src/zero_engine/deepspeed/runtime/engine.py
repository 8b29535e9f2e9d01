"""``deepspeed.runtime.engine``."""

from zero_engine.deepspeed.engine import DeepSpeedEngine
from zero_engine.script.refusal import refuse_other_names

__all__ = ["DeepSpeedEngine"]

refuse_other_names(__name__)
