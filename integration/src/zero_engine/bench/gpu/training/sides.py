"""Who trains: each makes a function that takes one step. One process, one device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import zero_core
from zero_engine.bench.gpt import Gpt
from zero_engine.bench.gpu.training.job import Job
from zero_engine.bench.offload_cuda.jobs import ADAMW
from zero_engine.bench.offload_cuda.sides import engine_loop, init_group

__all__ = ["SIDES"]

Step = Callable[[Tensor], Tensor]


def plain(job: Job, device: torch.device, store: str) -> Step:
    """The bare model and torch's fused AdamW on fp32 weights; in bf16 by autocast."""
    return _torch_loop(job.model().to(device), device, is_autocast=job.dtype == "bf16")


def plain_masters(job: Job, device: torch.device, store: str) -> Step:
    """Weights and gradients in the job's dtype, fp32 master weights by hand: as the engine."""
    dtype = torch.bfloat16 if job.dtype == "bf16" else torch.float32
    model = job.model().to(device)
    masters = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    model.to(dtype)
    weights: list[Tensor] = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, fused=True, **ADAMW)

    def step(ids: Tensor) -> Tensor:
        loss: Tensor = model(ids)
        torch.autograd.backward(loss)
        for master, weight in zip(masters, weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, list[Tensor](masters))
        optimizer.zero_grad()
        return loss.detach()

    return step


def plain_low(job: Job, device: torch.device, store: str) -> Step:
    """Weights, moments and all in the job's dtype: no master weights, so not the same numbers."""
    dtype = torch.bfloat16 if job.dtype == "bf16" else torch.float32
    return _torch_loop(job.model().to(device, dtype), device, is_autocast=False)


def fsdp2(job: Job, device: torch.device, store: str) -> Step:
    """`fully_shard` on every block and on the whole."""
    # Here, as it takes half a second that no other side needs.
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    init_group(device, store)
    model = job.model()
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (1,)),
        "mp_policy": low if job.dtype == "bf16" else MixedPrecisionPolicy(),
    }
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return _torch_loop(model, device, is_autocast=False)


def deepspeed(job: Job, device: torch.device, store: str) -> Step:
    """DeepSpeed; it compiles its fused Adam where it has not yet."""
    package: Any = importlib.import_module("deepspeed")
    init_group(device, store)
    engine, *_ = package.initialize(
        model=job.model(), config=job.config(), dist_init_required=False
    )
    return engine_loop(engine)


def zero(job: Job, device: torch.device, store: str) -> Step:
    """This engine, without a process group; as the others, nothing looks at gradients first."""
    engine = zero_core.build(job.model(), {**job.config(), "check_grad_overflow": False})
    return engine_loop(engine)


SIDES: dict[str, Callable[[Job, torch.device, str], Step]] = {
    "torch": plain,
    "torch_masters": plain_masters,
    "torch_low": plain_low,
    "fsdp2": fsdp2,
    "deepspeed": deepspeed,
    "zero": zero,
}


def _torch_loop(model: Gpt, device: torch.device, *, is_autocast: bool) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(ids: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=is_autocast):
            loss: Tensor = model(ids)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
