"""Stands for ``deepspeed.accelerator``: what ranks compute on, over torch.accelerator."""

from zero_engine.deepspeed.accelerator.real_accelerator import (
    get_accelerator,
    is_current_accelerator_supported,
)

__all__ = ["get_accelerator", "is_current_accelerator_supported"]
