"""Settings of a contender's rank processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import zero_core
from benchmarks.harness.models import MODELS, GptShape, find_device

BETAS = (0.9, 0.95)
QWZ, QGZ = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
FOUR_BITS: Mapping[str, Any] = {
    **QWZ,
    **QGZ,
    "zero_quantized_weights_format": "int4_difference",
    "zero_quantized_gradients_within_node": "int8",
    "zero_quantized_gradients_between_nodes": "int4",
    "zero_quantized_gradients_hadamard": True,
}
"""ZeRO++ with the fewest bits, without hpZ."""
LOSSLESS_WEIGHTS: Mapping[str, Any] = {"zero_lossless_weights": True}
LOSSLESS: Mapping[str, Any] = {**LOSSLESS_WEIGHTS, "zero_lossless_gradients": True}
LOSSLESS_FOUR_BITS: Mapping[str, Any] = {
    **{key: value for key, value in FOUR_BITS.items() if "weights" not in key},
    **LOSSLESS_WEIGHTS,
}
"""Lossless weights, and 4-bit gradients between nodes."""
DRY_SHAPE = GptShape(layers=2, width=64, heads=2, vocab=128, context=16)


@dataclass(frozen=True)
class Job:
    """A contender's model, sizes and configuration."""

    name: str
    side: str
    """Key of `benchmarks.harness.sides.SIDES`."""
    shape: GptShape
    micro_batch: int
    """Samples per rank."""
    steps: int
    """Timed steps."""
    warmup: int = 0
    """Untimed steps before the timed ones."""
    model: str = "plain"
    """Key of `benchmarks.harness.models.MODELS`."""
    is_deferred: bool = False
    """Defer the construction of parameters, for a model that the host cannot hold twice."""
    dtype: str = "fp32"
    """"fp32", or "bf16" or "fp16" over fp32 master weights."""
    lr: float = 1e-4
    stage: int = 0
    zero: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of ``zero_optimization``."""
    top: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of this engine's configuration, which DeepSpeed does not get."""
    ranks: int = 1
    threads: int = 1
    """CPU threads per rank."""
    shortest: int = 0
    """Smallest number of tokens that a step may draw per sample; 0: always ``shape.context``."""
    is_repeating: bool = False
    """Give every step the same samples, for a loss that must fall."""
    settling: int = 0
    """Maximum number of further untimed steps, until ``"ratio": "auto"`` has chosen a ratio."""
    num_traced: int = 0
    """Number of steps, after the timed ones, whose kernels are traced."""
    trace_file: str | None = None
    """File for the trace; None: nothing is traced."""
    device_limit_bytes: int | None = None
    """Limit of the device memory that torch's allocator may use."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Job:
        """Restore a job whose `asdict` was passed as JSON."""
        return cls(**{**values, "shape": GptShape(**values["shape"])})

    def dry(self) -> Job:
        warmup = min(self.warmup, 1)
        return replace(self, shape=DRY_SHAPE, micro_batch=2, steps=2, warmup=warmup)

    def unchecked(self) -> Job:
        """Return the job without overflow checks. The compared libraries make none either."""
        return replace(self, top={**self.top, "check_grad_overflow": False})

    @property
    def title(self) -> str:
        return f"{self.shape.numel / 1e6:.0f} M parameters, {self.ranks} ranks"

    @property
    def workload(self) -> dict[str, int]:
        """Model size and settings that all contenders of a CPU race share, for the report."""
        names = ("micro_batch", "ranks", "threads", "steps", "warmup")
        sizes = {name: asdict(self.shape)[name] for name in ("layers", "width", "context")}
        return sizes | {name: asdict(self)[name] for name in names}

    @property
    def is_offloaded(self) -> bool:
        return "offload_optimizer" in self.zero

    @property
    def adamw(self) -> dict[str, Any]:
        return {"lr": self.lr, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.1}

    def make_model(self) -> Any:
        """Make the model on the CPU in fp32, with the same values in every process.

        Values are drawn on the device, which is faster. The device's peak memory is reset
        afterwards. A deferred model has no values yet.
        """
        torch.manual_seed(0)
        if self.is_deferred:
            with zero_core.deferred_init():
                return MODELS[self.model](self.shape)
        device = find_device()
        with device:
            model = MODELS[self.model](self.shape).cpu()
        if device.type != "cpu":
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats(device)
        return model

    def meta_model(self) -> Any:
        with torch.device("meta"):
            return MODELS[self.model](self.shape)

    def plan(self, *, has_activations: bool = False, **where: Any) -> zero_core.Plan:
        """Return zero-core's plan of this job. ``where``: further arguments of `zero_core.plan`."""
        size = (self.micro_batch, self.shape.context)
        ids = torch.zeros(size, dtype=torch.int64, device="meta")
        inputs = [ids] if has_activations else None
        model, config = self.meta_model(), self.config()
        return zero_core.plan(model, config, self.ranks, example_inputs=inputs, **where)

    def config(self) -> dict[str, Any]:
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
        # With the default, 2^16, the first steps would overflow and be skipped.
        if self.dtype == "fp16":
            config["fp16"]["initial_scale_power"] = 12
        return config

    def batches(self, rank: int, device: torch.device | None = None) -> Iterator[Tensor]:
        """Yield a rank's token ids endlessly, on ``device``: int64, ``[micro_batch, length]``."""
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
