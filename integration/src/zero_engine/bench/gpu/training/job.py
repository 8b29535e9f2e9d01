"""What one fresh process trains, and how."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from zero_engine.bench.gpt import Gpt, GptShape
from zero_engine.bench.offload_cuda.jobs import ADAMW, drawn_on_device

__all__ = ["Job"]

SHORTEST = 8
"""Least tokens of a sample of random length, of as many parts of the longest."""


@dataclass(frozen=True)
class Job:
    """One contender with one model."""

    name: str
    """Of the row that it makes."""
    side: str
    """Whose code: one of `zero_engine.bench.gpu.training.sides.SIDES`."""
    dtype: str
    """"fp32", or "bf16" with fp32 master weights."""
    stage: int
    """Of an engine; others have none."""
    shape: GptShape
    micro_batch: int
    """Samples per step."""
    steps: int
    """Timed."""
    warmup: int
    """Untimed, before them."""
    num_traced: int = 0
    """Steps after the timed ones whose kernels are traced."""
    trace_file: str | None = None
    """Where that trace is kept; None: only what it comes to."""
    is_random_length: bool = False
    """Whether the samples of each step have a length of their own."""

    @classmethod
    def from_json(cls, text: str) -> Job:
        """What `to_json` gave."""
        values = json.loads(text)
        return cls(**{**values, "shape": GptShape(**values["shape"])})

    def to_json(self) -> str:
        """For a command line."""
        return json.dumps(asdict(self))

    def model(self) -> Gpt:
        """The model, fp32, on the CPU; with the same values for every side."""
        return drawn_on_device(Gpt, self.shape)

    def config(self) -> dict[str, Any]:
        """What an engine is given, this project's or DeepSpeed's."""
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "zero_optimization": {"stage": self.stage},
            "bf16": {"enabled": self.dtype == "bf16"},
            "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
            "gradient_clipping": 0.0,
        }

    def batches(self, device: torch.device) -> Iterator[Tensor]:
        """Token ids for ever: int64, ``[micro_batch, length]``, on ``device``."""
        generator = torch.Generator().manual_seed(1)
        longest = self.shape.context
        while True:
            length = longest
            if self.is_random_length:
                least = max(2, longest // SHORTEST)
                length = int(torch.randint(least, longest + 1, (), generator=generator))
            size = (self.micro_batch, length)
            yield torch.randint(self.shape.vocab, size, generator=generator).to(device)
