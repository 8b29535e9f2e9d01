"""DeepSpeed's JSON: reading, defaults, renamed keys, and the configuration in effect."""

from zero_engine.deepspeed.config.reader import read, read_monitors
from zero_engine.deepspeed.config.settings import Settings

__all__ = ["Settings", "read", "read_monitors"]
