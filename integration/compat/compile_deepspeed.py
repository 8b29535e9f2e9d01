"""Compile the DeepSpeed kernels that are otherwise compiled at first use on a CPU.

A compared program that is killed while it compiles leaves a lock on which later programs wait.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

from deepspeed.ops.op_builder import cpu

for lock in Path(os.environ["TORCH_EXTENSIONS_DIR"]).glob("*/lock"):
    lock.unlink()
for name in ("CPUAdam", "FusedAdam", "PinMemory", "ShareMemComm"):
    getattr(cpu, f"{name}Builder")().load(verbose=False)
