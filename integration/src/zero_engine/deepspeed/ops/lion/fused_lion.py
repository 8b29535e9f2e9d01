"""``deepspeed.ops.lion.fused_lion``."""

from zero_engine.deepspeed.ops.lion import FusedLion
from zero_engine.script.refusal import refuse_other_names

__all__ = ["FusedLion"]

refuse_other_names(__name__)
