"""``deepspeed.ops.op_builder.all_ops``."""

from zero_engine.deepspeed.ops.op_builder import ALL_OPS
from zero_engine.script.refusal import refuse_other_names

__all__ = ["ALL_OPS"]

refuse_other_names(__name__)
