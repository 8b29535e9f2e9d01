"""``deepspeed.ops``: optimizers, and builders through which scripts request kernels."""

from __future__ import annotations

from zero_engine.deepspeed.ops import op_builder

__compatible_ops__ = {name: builder.is_compatible() for name, builder in op_builder.ALL_OPS.items()}
"""Which of DeepSpeed's operations have a kernel here."""
