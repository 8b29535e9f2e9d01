"""Reading of DeepSpeed's JSON configuration, with its defaults and old keys."""

from zero_engine.deepspeed.config.reader import Settings, read

__all__ = ["Settings", "read"]
