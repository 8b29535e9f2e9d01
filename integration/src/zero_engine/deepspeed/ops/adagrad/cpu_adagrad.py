"""``deepspeed.ops.adagrad.cpu_adagrad``."""

from zero_engine.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from zero_engine.script.refusal import refuse_other_names

__all__ = ["DeepSpeedCPUAdagrad"]

refuse_other_names(__name__)
