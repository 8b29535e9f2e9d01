"""`DeepSpeedEngine`, its base classes and its optimizer."""

from zero_engine.deepspeed.engine.engine import DeepSpeedEngine as DeepSpeedEngine
