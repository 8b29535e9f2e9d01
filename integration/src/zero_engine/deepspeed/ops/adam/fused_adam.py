"""``deepspeed.ops.adam.fused_adam``."""

from zero_engine.deepspeed.ops.adam import FusedAdam
from zero_engine.script.refusal import refuse_other_names

__all__ = ["FusedAdam"]

refuse_other_names(__name__)
