"""What one fresh process of the benchmark measures, and how it is started."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

import zero_core
from zero_engine.bench.gpt import Gpt, GptShape, GptWithCheckpoints, GptWithSmallLogits
from zero_engine.bench.processes import CPU_ALONE, RankError, run_ranks

__all__ = ["ADAMW", "Clock", "Job", "Runner", "drawn_on_device", "find_device"]

ADAMW: Mapping[str, Any] = {
    "lr": 1e-4,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
}
"""Hyperparameters of everyone's AdamW."""
LOG_LENGTH = 4000
"""Characters of the end of what a process said that are kept if it fails."""


@dataclass(frozen=True)
class Job:
    """One contender with one model."""

    name: str
    """Of the row that it makes."""
    side: str
    """Whose code: one of `zero_engine.bench.offload_cuda.sides.SIDES`."""
    shape: GptShape
    micro_batch: int
    """Samples per step."""
    steps: int
    """Timed."""
    warmup: int
    """Untimed, before them."""
    settling: int = 0
    """Most further ones, which end when ``"ratio": "auto"`` has settled."""
    stage: int = 2
    offload: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of ``offload_optimizer``."""
    dtype: str = "bf16"
    """"bf16" or "fp16"."""
    num_traced: int = 0
    """Steps after the timed ones whose kernels are traced."""
    trace_file: str | None = None
    """Where that trace is kept; None: only what it comes to."""
    device_limit_bytes: int | None = None
    is_large: bool = False
    """Deferred construction, activation checkpointing, and logits of one sample at a time."""
    is_lean: bool = False
    """Blocks and logits are computed again in backward, by the model itself on every side."""
    is_repeating: bool = False
    """Every step sees the same samples, so that the loss has to fall."""

    @classmethod
    def from_json(cls, text: str) -> Job:
        """What `to_json` gave."""
        values = json.loads(text)
        return cls(**{**values, "shape": GptShape(**values["shape"])})

    def to_json(self) -> str:
        """For a command line."""
        return json.dumps(asdict(self))

    def model(self) -> Gpt:
        """The model, fp32 on the CPU, the same on every side; a large one has no values yet."""
        if self.is_large:
            torch.manual_seed(0)
            with zero_core.deferred_init():
                return GptWithSmallLogits(self.shape)
        return drawn_on_device(GptWithCheckpoints if self.is_lean else Gpt, self.shape)

    def config(self) -> dict[str, Any]:
        """This engine's configuration."""
        config = self.deepspeed_config()
        if self.dtype != "fp16":  # as the others: nothing calls a step off
            config["check_grad_overflow"] = False
        if self.is_large:
            config["activation_checkpointing"] = {}
        return config

    def deepspeed_config(self) -> dict[str, Any]:
        """What of it DeepSpeed is given too."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "zero_optimization": {
                "stage": self.stage,
                "offload_optimizer": {"device": "cpu", "pin_memory": True, **self.offload},
            },
            self.dtype: {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
            "gradient_clipping": 0.0,
        }
        if self.dtype == "fp16":  # 2^16, the default, would cost the first steps
            config["fp16"]["initial_scale_power"] = 12
        return config

    def batches(self, device: torch.device) -> Iterator[Tensor]:
        """Token ids for ever: int64, ``[micro_batch, context]``, on ``device``."""
        generator = torch.Generator().manual_seed(1)
        size = (self.micro_batch, self.shape.context)
        while True:
            ids = torch.randint(self.shape.vocab, size, generator=generator).to(device)
            yield ids
            while self.is_repeating:
                yield ids


def drawn_on_device(model_class: type[Gpt], shape: GptShape) -> Gpt:
    """The model on the CPU, its values drawn on the device, which is faster.

    What it took there is given back, and is no part of the peaks that are measured.
    """
    device = find_device()
    torch.manual_seed(0)
    with device:
        model = model_class(shape).cpu()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)
    return model


class Clock:
    """How much of the time limit is left."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._end = time.monotonic() + limit_s

    def left_s(self) -> float:
        """Seconds; 0 when the time is over."""
        return max(0.0, self._end - time.monotonic())


def find_device() -> torch.device:
    """The accelerator, or the CPU if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return torch.device("cpu")
    return torch.device(found.type, torch.accelerator.current_device_index())


class Runner:
    """Starts processes one after another, and makes a row of whatever becomes of them."""

    def __init__(self, clock: Clock, *, device_type: str) -> None:
        self.clock = clock
        self.device_type = device_type

    def run(self, job: Job) -> dict[str, Any]:
        """What the job found, or ``failure`` or ``skipped`` with the reason."""
        return self.start("zero_engine.bench.offload_cuda.rank", job.to_json())

    def start(self, module: str, *arguments: str) -> dict[str, Any]:
        """The same for any module that writes a JSON object to its last argument."""
        left_s = self.clock.left_s()
        if not left_s:
            return {"skipped": f"the time limit of {self.clock.limit_s:.0f} s is over"}
        # On the CPU nothing may find an accelerator that is there; else all is as it is found.
        environment = CPU_ALONE if self.device_type == "cpu" else {}
        try:
            (found,) = run_ranks(module, arguments, 1, environment, limit_s=left_s)
        except RankError as error:
            # What it had found by then, if it told; and what it said, to find out why.
            rest = (error.found[0] if error.found else None) or {}
            return {**rest, "failure": str(error), "log": error.log[-LOG_LENGTH:]}
        return found
