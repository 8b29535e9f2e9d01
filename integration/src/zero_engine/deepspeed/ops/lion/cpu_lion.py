"""``deepspeed.ops.lion.cpu_lion``."""

from zero_engine.deepspeed.ops.lion import DeepSpeedCPULion
from zero_engine.script.refusal import refuse_other_names

__all__ = ["DeepSpeedCPULion"]

refuse_other_names(__name__)
