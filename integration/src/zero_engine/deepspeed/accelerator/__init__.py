"""Stands for ``deepspeed.accelerator``: what ranks compute on, over torch.accelerator."""

from zero_engine.deepspeed.accelerator.real_accelerator import (
    get_accelerator,
    is_current_accelerator_supported,
)
from zero_engine.script.refusal import refuse_other_names

__all__ = ["get_accelerator", "is_current_accelerator_supported"]

refuse_other_names(__name__)
