"""``deepspeed.runtime.config``."""

from zero_core import ConfigError

__all__ = ["DeepSpeedConfigError"]

DeepSpeedConfigError = ConfigError
