"""Sizes of the experiments on an accelerator: the real ones, and those of a dry run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.harness.memory import GIB
from benchmarks.harness.models import GptShape


@dataclass(frozen=True)
class Sizes:
    """Models, and how often they are measured."""

    shape: GptShape
    """Of speed and timeline. At ratio 0 all its states must fit on the device."""
    tutorial: GptShape
    """Of capacity with a device limit."""
    wide: GptShape
    """Of capacity with a host limit."""
    micro_batch: int
    """Samples per step of speed and timeline."""
    large_batch: int
    """Samples per step of capacity."""
    rounds: int
    """Times that every contender of speed runs."""
    steps: int
    warmup: int
    settling: int
    """Most steps for ``"ratio": "auto"`` to measure and settle, after the warm-up."""
    large_steps: int
    num_traced: int
    stage: int
    device_limit_bytes: int
    host_limit_bytes: int
    triad_numel: int
    """Elements of each array of the host's triad, and of what is copied over the bus."""


REAL = Sizes(
    shape=GptShape(layers=24, width=2048, heads=16, vocab=50257, context=1024),
    # DeepSpeed's ZeRO-Offload tutorial: 50 layers, 4096 wide, batch 10, activation checkpointing.
    tutorial=GptShape(layers=50, width=4096, heads=32, vocab=50257, context=1024),
    wide=GptShape(layers=40, width=5120, heads=40, vocab=50257, context=1024),
    micro_batch=4,
    large_batch=10,
    rounds=3,
    steps=10,
    warmup=3,
    settling=80,
    large_steps=4,
    num_traced=3,
    stage=2,
    device_limit_bytes=32 * GIB,
    host_limit_bytes=128 * GIB,
    triad_numel=256 * 2**20,
)
_TINY = GptShape(layers=2, width=64, heads=2, vocab=128, context=16)
DRY = replace(
    REAL,
    shape=_TINY,
    tutorial=_TINY,
    wide=_TINY,
    micro_batch=2,
    large_batch=3,
    rounds=1,
    steps=2,
    warmup=1,
    triad_numel=2**20,
)
REAL_IN_MEMORY = GptShape(layers=24, width=1024, heads=16, vocab=50257, context=1024)
"""Of the parts without offload."""
