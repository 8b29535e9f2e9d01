"""The contenders: each makes, from the same model, a function that takes one training step.

Every one uses its fastest AdamW for fp32 on this device: torch's fused one, or the engine's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zero_core
from zero_core.protocols import StateTierFactory
from zero_engine.bench.workload import ADAMW, Workload

__all__ = [
    "CONTENDERS",
    "HOST",
    "NEEDS",
    "CountingStep",
    "Step",
    "bare",
    "build_engine",
    "deepspeed",
    "engine_loop",
    "this",
]

Step = Callable[[Tensor], Tensor]
"""Takes a rank's token ids, updates the model, returns the loss."""


MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@runtime_checkable
class CountingStep(Protocol):
    """A `Step` that counts something of its own."""

    def __call__(self, ids: Tensor, /) -> Tensor:
        """As `Step`."""
        ...

    def counters(self) -> Mapping[str, float]:
        """What was counted so far; it only grows."""
        ...


def bare(workload: Workload) -> Step:
    """Forward and backward alone: what no engine can be faster than."""
    model = workload.model()

    def step(ids: Tensor) -> Tensor:
        loss = _loss(model, ids)
        torch.autograd.backward(loss)
        model.zero_grad()
        return loss.detach()

    return step


def ddp(workload: Workload) -> Step:
    """`DistributedDataParallel`."""
    model = workload.model()
    return _plain_loop(DistributedDataParallel(model), model)


def fsdp2(workload: Workload) -> Step:
    """`fully_shard` on every block and on the whole."""
    model = workload.model()
    mesh = init_device_mesh("cpu", (workload.ranks,))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _plain_loop(model, model)


def deepspeed(
    stage: int, make_optimizer: MakeOptimizer | None = None, **zero: Any
) -> Callable[[Workload], Step]:
    """DeepSpeed from the package index, with further keys of ``zero_optimization``."""

    def make(workload: Workload) -> Step:
        package: Any = importlib.import_module("deepspeed")
        model = workload.model()
        engine, *_ = package.initialize(
            model=model,
            optimizer=(make_optimizer or _fused_adamw)(model),
            config={
                "train_micro_batch_size_per_gpu": workload.micro_batch,
                "zero_optimization": {"stage": stage, **zero},
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": 0.0,
            },
            dist_init_required=False,
        )
        return engine_loop(engine)

    return make


def this(stage: int, **zero: Any) -> Callable[[Workload], Step]:
    """This engine, at ``stage``, with further keys of ``zero_optimization``."""
    return lambda workload: engine_loop(build_engine(workload, {"stage": stage, **zero}))


def build_engine(
    workload: Workload, zero: Mapping[str, Any], state_tier: StateTierFactory | None = None
) -> zero_core.Engine:
    """This engine, with the ``zero_optimization`` block ``zero``."""
    params = {**ADAMW, "betas": list(ADAMW["betas"])}  # type: ignore[call-overload]
    return zero_core.build(
        workload.model(),
        {
            "train_micro_batch_size_per_gpu": workload.micro_batch,
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": params},
        },
        state_tier=state_tier,
    )


HOST = {"device": "cpu", "ratio": 1.0}
CONTENDERS: dict[str, Callable[[Workload], Step]] = {
    "bare": bare,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "deepspeed-1": deepspeed(1),
    "deepspeed-2": deepspeed(2),
    "deepspeed-3": deepspeed(3),
    "zero-0": this(0),
    "zero-1": this(1),
    "zero-2": this(2),
    "zero-3": this(3),
    "zero-3-offload": this(3, offload_optimizer=HOST),
}
"""By name; ``zero-N`` is this engine at stage N."""

NEEDS = {name: "deepspeed" for name in CONTENDERS if name.startswith("deepspeed")}
"""What else has to be installed for a contender."""


def _plain_loop(wrapped: nn.Module, model: nn.Module) -> Step:
    """The loop of a wrapper that leaves the optimizer to the user."""
    optimizer = _fused_adamw(model)

    def step(ids: Tensor) -> Tensor:
        loss = _loss(wrapped, ids)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def engine_loop(engine: Any) -> Step:
    """The loop of an engine in DeepSpeed's manner."""

    def step(ids: Tensor) -> Tensor:
        loss = _loss(engine, ids)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _loss(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def _fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    settings: dict[str, Any] = dict(ADAMW)
    return torch.optim.AdamW(model.parameters(), fused=True, **settings)
