"""``deepspeed.ops.op_builder.builder``."""

from zero_engine.deepspeed.ops.op_builder import OpBuilder
from zero_engine.script.refusal import refuse_other_names

__all__ = ["OpBuilder"]

refuse_other_names(__name__)
