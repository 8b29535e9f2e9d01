"""Who is compared by ``bench offload``: optimizer state off the device, here and in DeepSpeed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zero_engine.bench.contenders import (
    HOST,
    Step,
    bare,
    build_engine,
    deepspeed,
    engine_loop,
    this,
)
from zero_engine.bench.kept_tier import KeptTier
from zero_engine.bench.workload import ADAMW, Workload

__all__ = ["NEEDS", "NVME_PATH", "OFFLOADERS", "RIVALS"]

NVME_PATH = "ZERO_BENCH_NVME_PATH"
"""Environment variable: the folder for the states of contenders with files."""


class _StepWithFiles:
    """A `CountingStep` over a tier whose states lie in files."""

    def __init__(self, step: Step, kept: KeptTier) -> None:
        self._step = step
        self._kept = kept

    def __call__(self, ids: Tensor, /) -> Tensor:
        return self._step(ids)

    def counters(self) -> Mapping[str, float]:
        """Seconds, see `KeptTier.io_seconds`."""
        return self._kept.io_seconds()


def nvme(stage: int) -> Callable[[Workload], Step]:
    """This engine, states in files below the folder that `NVME_PATH` names."""

    def make(workload: Workload) -> Step:
        kept = KeptTier()
        block = {"device": "nvme", "nvme_path": os.environ[NVME_PATH]}
        engine = build_engine(workload, {"stage": stage, "offload_optimizer": block}, kept)
        return _StepWithFiles(engine_loop(engine), kept)

    return make


def _cpu_adam_of_deepspeed(model: nn.Module) -> torch.optim.Optimizer:
    """DeepSpeed's own, which compiles itself where it has not yet."""
    adam: Any = importlib.import_module("deepspeed.ops.adam")
    settings: dict[str, Any] = dict(ADAMW)
    made: torch.optim.Optimizer = adam.DeepSpeedCPUAdam(
        model.parameters(), adamw_mode=True, **settings
    )
    return made


_DEEPSPEED_HOST = {"device": "cpu", "pin_memory": False}
OFFLOADERS: dict[str, Callable[[Workload], Step]] = {
    "bare": bare,
    "deepspeed-2-offload": deepspeed(2, _cpu_adam_of_deepspeed, offload_optimizer=_DEEPSPEED_HOST),
    "deepspeed-3-offload": deepspeed(3, _cpu_adam_of_deepspeed, offload_optimizer=_DEEPSPEED_HOST),
    "zero-2-offload": this(2, offload_optimizer=HOST),
    "zero-3-offload": this(3, offload_optimizer=HOST),
    "zero-2-nvme": nvme(2),
    "zero-3-nvme": nvme(3),
    "zero-3-int8": this(3, offload_optimizer={"device": "cpu", "state_dtype": "int8"}),
}
"""By name; ``zero-N`` is this engine at stage N."""

RIVALS = {
    f"zero-{stage}-{kind}": f"deepspeed-{stage}-offload"
    for stage in (2, 3)
    for kind in ("offload", "nvme", "int8")
}
"""Whom each of ours is held against: DeepSpeed at the same stage, states in host memory."""

NEEDS = {name: "deepspeed" for name in OFFLOADERS if name.startswith("deepspeed")}
"""What else has to be installed for a contender."""
