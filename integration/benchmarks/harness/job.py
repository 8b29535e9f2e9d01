"""A contender with one model: the plain data that its rank processes are started with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.models import GptShape, make_model, model_class

BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Job:
    """A contender's model, sizes and configuration."""

    name: str
    """Of its row."""
    side: str
    """Of `benchmarks.harness.sides.SIDES`."""
    shape: GptShape
    micro_batch: int
    """Samples per rank and step."""
    steps: int
    """Timed."""
    warmup: int
    """Untimed, before them."""
    model: str = "plain"
    """Of `benchmarks.harness.models.MODELS`."""
    is_deferred: bool = False
    """Deferred construction, for a model that the host cannot hold twice."""
    dtype: str = "fp32"
    """"fp32", or "bf16" or "fp16" over fp32 master weights."""
    lr: float = 1e-4
    stage: int = 0
    zero: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of ``zero_optimization``."""
    top: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of this engine's configuration; DeepSpeed does not get them."""
    ranks: int = 1
    threads: int = 1
    """Of each rank, on the CPU."""
    shortest: int = 0
    """Least tokens of a sample, where each step draws a length; 0: all have ``shape.context``."""
    is_repeating: bool = False
    """Every step sees the same samples, so that the loss has to fall."""
    settling: int = 0
    """Most untimed steps more, which end when ``"ratio": "auto"`` has settled."""
    num_traced: int = 0
    """Steps after the timed ones whose kernels are traced."""
    trace_file: str | None = None
    """Where that trace is kept; None: only its summary."""
    device_limit_bytes: int | None = None
    """Most device memory of torch's allocator."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Job:
        """Return the job whose `asdict` went through JSON."""
        return cls(**{**values, "shape": GptShape(**values["shape"])})

    @property
    def title(self) -> str:
        return f"{self.shape.numel / 1e6:.0f} M parameters, {self.ranks} ranks"

    @property
    def workload(self) -> dict[str, int]:
        """The part of a comparison on the CPU that all contenders share, for a report."""
        shape = asdict(self.shape)
        names = ("micro_batch", "ranks", "threads", "steps", "warmup")
        sizes = {name: shape[name] for name in ("layers", "width", "context")}
        return sizes | {name: getattr(self, name) for name in names}

    @property
    def is_offloaded(self) -> bool:
        return "offload_optimizer" in self.zero

    @property
    def adamw(self) -> dict[str, Any]:
        """Hyperparameters of everyone's AdamW."""
        return {"lr": self.lr, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.1}

    def make_model(self) -> Any:
        return make_model(self.model, self.shape, is_deferred=self.is_deferred)

    def meta_model(self) -> Any:
        """Return the model without memory, for a plan."""
        with torch.device("meta"):
            return model_class(self.model)(self.shape)

    def config(self) -> dict[str, Any]:
        """Return this engine's configuration."""
        return {**self.deepspeed_config(), **self.top}

    def deepspeed_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "zero_optimization": {"stage": self.stage, **self.zero},
            "optimizer": {"type": "AdamW", "params": {**self.adamw, "betas": list(BETAS)}},
            "gradient_clipping": 0.0,
        }
        if self.dtype != "fp32":
            config[self.dtype] = {"enabled": True}
        if self.dtype == "fp16":  # 2^16, the default, would cost the first steps
            config["fp16"]["initial_scale_power"] = 12
        return config

    def batches(self, rank: int, device: torch.device | None = None) -> Iterator[Tensor]:
        """Yield a rank's token ids for ever: int64, ``[micro_batch, length]``, on ``device``."""
        generator = torch.Generator().manual_seed(1 + rank)
        length = self.shape.context
        while True:
            if self.shortest:
                bounds = (self.shortest, self.shape.context + 1)
                length = int(torch.randint(*bounds, (), generator=generator))
            size = (self.micro_batch, length)
            ids = torch.randint(self.shape.vocab, size, generator=generator).to(device=device)
            yield ids
            while self.is_repeating:
                yield ids
