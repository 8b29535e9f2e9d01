"""Reading of DeepSpeed's JSON configuration, with its defaults and old keys."""

from zero_engine.deepspeed.config.reader import Settings as Settings
from zero_engine.deepspeed.config.reader import read as read
