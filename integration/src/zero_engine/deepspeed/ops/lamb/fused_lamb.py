"""``deepspeed.ops.lamb.fused_lamb``."""

from zero_engine.deepspeed.ops.lamb import FusedLamb
from zero_engine.script.refusal import refuse_other_names

__all__ = ["FusedLamb"]

refuse_other_names(__name__)
