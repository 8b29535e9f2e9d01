"""``deepspeed.runtime.config``."""

from zero_core import ConfigError
from zero_engine.script.refusal import refuse_other_names

__all__ = ["DeepSpeedConfigError"]

DeepSpeedConfigError = ConfigError

refuse_other_names(__name__)
