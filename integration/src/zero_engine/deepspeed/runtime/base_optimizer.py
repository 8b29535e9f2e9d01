"""``deepspeed.runtime.base_optimizer``: what an engine's optimizer is an instance of."""

from __future__ import annotations

from zero_engine.deepspeed.optimizer import DeepSpeedOptimizer
from zero_engine.script.refusal import refuse_other_names

__all__ = ["DeepSpeedOptimizer"]

refuse_other_names(__name__)
