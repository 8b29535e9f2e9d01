"""``deepspeed.ops``: the optimizers, and the builders by which scripts ask for kernels."""

from __future__ import annotations

from zero_engine.deepspeed.ops import op_builder

__compatible_ops__ = {name: name in op_builder.SERVED for name in op_builder.ALL_OPS}
"""Which of DeepSpeed's operations have a kernel here."""
