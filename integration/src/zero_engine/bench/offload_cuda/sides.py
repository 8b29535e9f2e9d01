"""The sides of the comparison: each makes a function that takes one training step.

One process, one device. Every side computes in 16 bits over fp32 master weights in host memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import zero_core
from zero_engine.bench.kept_tier import KeptTier
from zero_engine.bench.offload_cuda.jobs import ADAMW, Job

__all__ = ["SIDES", "Side", "engine_loop", "init_group"]

Step = Callable[[Tensor], Tensor]


@dataclass
class Side:
    """A contender that is ready to train."""

    step: Step
    """Takes token ids, updates the model, returns the loss without waiting for it."""
    kept: KeptTier = field(default_factory=KeptTier)
    """This engine's tier; the others have none."""
    skipped_steps: Callable[[], int] = lambda: 0
    """Steps so far that were skipped since a gradient was not finite."""


def zero(job: Job, device: torch.device, store: str) -> Side:
    """This engine, without a process group."""
    kept = KeptTier()
    engine = zero_core.build(job.model(), job.config(), state_tier=kept)
    return Side(engine_loop(engine), kept, lambda: engine.skipped_steps)


def fsdp2(job: Job, device: torch.device, store: str) -> Side:
    """`fully_shard` on every block and on the whole, with CPUOffloadPolicy and a fused AdamW.

    At stage 2 a unit stays whole from forward to backward, at stage 3 it is fetched twice.
    """
    # Here, as it takes half a second that no other side needs.
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    init_group(device, store)
    model = job.model()
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (1,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu"),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "reshard_after_forward": job.stage == 3,
    }
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(ids: Tensor) -> Tensor:
        loss: Tensor = model(ids)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Side(step)


def deepspeed(job: Job, device: torch.device, store: str) -> Side:
    """DeepSpeed's ZeRO-Offload; it compiles its Adam where it has not yet."""
    package: Any = importlib.import_module("deepspeed")
    init_group(device, store)
    engine, *_ = package.initialize(
        model=job.model(), config=job.deepspeed_config(), dist_init_required=False
    )
    return Side(engine_loop(engine))


SIDES: dict[str, Callable[[Job, torch.device, str], Side]] = {
    "zero": zero,
    "fsdp2": fsdp2,
    "deepspeed": deepspeed,
}


def engine_loop(engine: Any) -> Step:
    """A step of an engine of this project or of DeepSpeed."""

    def step(ids: Tensor) -> Tensor:
        loss: Tensor = engine(ids)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def init_group(device: torch.device, store: str) -> None:
    """A group of this process alone, for those who cannot do without one."""
    backend = "gloo"
    if device.type != "cpu":
        of_device = dist.get_default_backend_for_device(device)
        backend = f"cpu:gloo,{device.type}:{of_device}"
    alone = dist.FileStore(store, 1)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=alone, rank=0, world_size=1)
