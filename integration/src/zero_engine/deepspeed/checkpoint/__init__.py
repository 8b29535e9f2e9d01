"""``deepspeed.checkpoint``: what of it scripts use."""

from zero_engine.deepspeed.checkpoint.utils import clone_tensors_for_torch_save

__all__ = ["clone_tensors_for_torch_save"]
