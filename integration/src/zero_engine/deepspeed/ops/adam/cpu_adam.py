"""``deepspeed.ops.adam.cpu_adam``."""

from zero_engine.deepspeed.ops.adam import DeepSpeedCPUAdam
from zero_engine.script.refusal import refuse_other_names

__all__ = ["DeepSpeedCPUAdam"]

refuse_other_names(__name__)
