"""DeepSpeed's JSON: reading, defaults, renamed keys, and the configuration in effect."""

from zero_engine.deepspeed.config.reader import Settings, read

__all__ = ["Settings", "read"]
