"""The contenders: each makes, of the same model, a function that takes one training step.

Everyone computes and communicates in bf16 over fp32 master weights, with a fused AdamW.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zero_core
from zero_engine.bench.comm.job import Job

__all__ = ["BARE", "CONTENDERS", "NEEDS", "PEERS", "Contender", "has_meaning", "zero_config"]

Step = Callable[[Tensor], Tensor]


def _nothing_counted() -> None:
    return None


@dataclass(frozen=True)
class Contender:
    """One that is ready to train."""

    step: Step
    """Takes a rank's token ids, updates the model, returns the loss."""
    counted: Callable[[], int | None] = _nothing_counted
    """Bytes that this rank sent to the other node in the last step, by its own count, if any."""


ADAMW: Mapping[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

BARE = "bare"
PEERS = ("fsdp2", "deepspeed-3")
NEEDS = {"deepspeed-3": "deepspeed"}
"""What else has to be installed for a contender."""

_QWZ = {"zero_quantized_weights": True}
_QGZ = {"zero_quantized_gradients": True}
_FOUR_BITS = {
    **_QWZ,
    "zero_quantized_weights_format": "int4_difference",
    **_QGZ,
    "zero_quantized_gradients_within_node": "int8",
    "zero_quantized_gradients_between_nodes": "int4",
    "zero_quantized_gradients_hadamard": True,
}


class _Trained(Protocol):
    """An engine in DeepSpeed's manner."""

    def __call__(self, ids: Tensor, /) -> Any: ...

    def backward(self, loss: Tensor, /) -> Any: ...

    def step(self) -> Any: ...


def has_meaning(name: str, job: Job) -> bool:
    """Whether the contender is another than the plain one: a node of one rank has no shards."""
    return name != "zero-3-hpz" or job.ranks_per_node > 1


def zero_config(name: str, job: Job) -> dict[str, Any]:
    """This engine's whole configuration for its contender ``name``."""
    hpz = {"zero_hpz_partition_size": job.ranks_per_node}
    blocks: dict[str, dict[str, Any]] = {
        "zero-3": {},
        "zero-3-qwz": _QWZ,
        "zero-3-hpz": hpz,
        "zero-3-qgz": _QGZ,
        "zero-3-all": {**_QWZ, **hpz, **_QGZ},
        "zero-3-4bit": {**_FOUR_BITS, **hpz},
    }
    return {
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "zero_optimization": {"stage": 3, **blocks[name]},
        "bf16": {"enabled": True},
        "check_grad_overflow": False,  # as the others: nothing calls a step off
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
    }


def _bare(name: str, job: Job) -> Contender:
    """Forward and backward in bf16 on every rank at once, and nothing exchanged."""
    model = job.model().bfloat16()

    def step(ids: Tensor) -> Tensor:
        loss: Tensor = model(ids)
        torch.autograd.backward(loss)
        model.zero_grad()
        return loss.detach()

    return Contender(step)


def _fsdp2(name: str, job: Job) -> Contender:
    """`fully_shard` on every block and on the whole, parameters and gradients sent in bf16."""
    model = job.model()
    settings: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (job.world_size,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
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

    return Contender(step)


def _deepspeed(name: str, job: Job) -> Contender:
    """DeepSpeed's ZeRO-3 from the package index."""
    package: Any = importlib.import_module("deepspeed")
    model = job.model()
    engine, *_ = package.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), fused=True, **ADAMW),
        config={
            "train_micro_batch_size_per_gpu": job.micro_batch,
            "zero_optimization": {"stage": 3},
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
        },
        dist_init_required=False,
    )
    return Contender(_engine_loop(engine))


def _zero(name: str, job: Job) -> Contender:
    """This engine."""
    engine = zero_core.build(job.model(), zero_config(name, job))

    def counted() -> int:
        return sum(kind.between_nodes_bytes for kind in engine.comm_report())

    return Contender(_engine_loop(engine), counted)


CONTENDERS: Mapping[str, Callable[[str, Job], Contender]] = {
    BARE: _bare,
    "fsdp2": _fsdp2,
    "deepspeed-3": _deepspeed,
    "zero-3": _zero,
    "zero-3-qwz": _zero,
    "zero-3-hpz": _zero,
    "zero-3-qgz": _zero,
    "zero-3-all": _zero,
    "zero-3-4bit": _zero,
}
"""By name; each is made from its name and the job, when a process group is there."""


def _engine_loop(engine: _Trained) -> Step:
    def step(ids: Tensor) -> Tensor:
        loss: Tensor = engine(ids)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
