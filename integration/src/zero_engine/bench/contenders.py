"""The contenders: each makes, from the same model, a function that takes one training step.

Every one uses its fastest AdamW for fp32 on this device: torch's fused one, or the engine's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zero_core
from zero_engine.bench.workload import ADAMW, Workload

__all__ = ["CONTENDERS", "NEEDS", "Step"]

Step = Callable[[Tensor], Tensor]
"""Takes a rank's token ids, updates the model, returns the loss."""


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


def deepspeed(stage: int) -> Callable[[Workload], Step]:
    """DeepSpeed from the package index, at ``stage``."""

    def make(workload: Workload) -> Step:
        package: Any = importlib.import_module("deepspeed")
        model = workload.model()
        engine, *_ = package.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), fused=True, **_adamw()),
            config={
                "train_micro_batch_size_per_gpu": workload.micro_batch,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": 0.0,
            },
            dist_init_required=False,
        )
        return _engine_loop(engine)

    return make


def this(stage: int, **zero: Any) -> Callable[[Workload], Step]:
    """This engine, at ``stage``, with further keys of ``zero_optimization``."""

    def make(workload: Workload) -> Step:
        params = {**ADAMW, "betas": list(ADAMW["betas"])}  # type: ignore[call-overload]
        engine = zero_core.build(
            workload.model(),
            {
                "train_micro_batch_size_per_gpu": workload.micro_batch,
                "zero_optimization": {"stage": stage, **zero},
                "optimizer": {"type": "AdamW", "params": params},
            },
        )
        return _engine_loop(engine)

    return make


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
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **_adamw())

    def step(ids: Tensor) -> Tensor:
        loss = _loss(wrapped, ids)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _engine_loop(engine: Any) -> Step:
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


def _adamw() -> dict[str, Any]:
    return dict(ADAMW)
