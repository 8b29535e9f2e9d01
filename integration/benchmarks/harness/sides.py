"""Contenders of a comparison. Each makes a function that trains one step.

All compute in the job's dtype over fp32 master weights. Each uses its fastest AdamW for the device:
torch's fused one, DeepSpeed's, or the engine's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import cpu_adam
import zero_core
import zero_offload
from benchmarks.harness.job import Job
from benchmarks.harness.ranks import Place
from zero_offload.tiers.auto_tier import AutoTier
from zero_offload.tiers.twin import TwinTier

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Step = Callable[[Tensor], Tensor]
"""Trains one step on a rank's token ids and returns the loss, without waiting for the device."""


class KeptTier:
    """A `zero_core.protocols.StateTierFactory` that keeps a reference to the tier it makes."""

    def __init__(self) -> None:
        self.tier: TwinTier | None = None
        self._numel = 0

    def __call__(self, **parts: Any) -> TwinTier:
        self._numel = parts["numel"]
        self.tier = zero_offload.create_tier(**{**parts, "adam_kernel": cpu_adam})
        return self.tier

    def moved_bytes(self) -> dict[str, int]:
        """Return the bytes moved so far: gradients as ``bytes_d2h``, parameters as ``bytes_h2d``.

        Waits for a running update, whose bytes count too.
        """
        if self.tier is None:
            return {"bytes_d2h": 0, "bytes_h2d": 0}
        self.tier.wait_params(0, self._numel)
        return {"bytes_d2h": self.tier.bytes_d2h, "bytes_h2d": self.tier.bytes_h2d}

    def ratio_report(self) -> dict[str, Any] | None:
        report = self.tier.ratio_report if isinstance(self.tier, AutoTier) else None
        return None if report is None else asdict(report)

    def host_share(self) -> float | None:
        return None if self.tier is None else self.tier.host_numel / max(1, self._numel)

    def counters(self) -> dict[str, float]:
        """Return `moved_bytes`, and seconds of file access so far if the tier has a file.

        ``io_s`` is the time of reads and writes, ``stall_s`` the time that the training thread
        waited for an update.
        """
        if self.tier is None or (file := self.tier.file) is None:
            return {**self.moved_bytes()}
        seconds = {"io_s": file.io_s, "stall_s": self.tier.stall_s}
        return {**seconds, **self.moved_bytes()}


@dataclass
class Side:
    step: Step
    model: Any
    """The job's model, as the side trains it."""
    engine: zero_core.Engine | None = None
    """This project's engine; None for other sides."""
    kept: KeptTier = field(default_factory=KeptTier)


def bare(job: Job, device: torch.device, place: Place) -> Side:
    model = job.make_model().to(device, DTYPES[job.dtype])
    return Side(_step(model, model.zero_grad), model)


def ddp(job: Job, device: torch.device, place: Place) -> Side:
    """Train with DistributedDataParallel and fp32 weights, in bf16 by autocast."""
    place.join(device)
    model = job.make_model().to(device)
    wrapped = nn.parallel.DistributedDataParallel(model)
    return replace(torch_loop(job, wrapped, autocast=device.type), model=model)


def plain(job: Job, device: torch.device, place: Place) -> Side:
    """Train the bare model with fp32 weights, in bf16 by autocast."""
    return torch_loop(job, job.make_model().to(device), autocast=device.type)


def plain_masters(job: Job, device: torch.device, place: Place) -> Side:
    """Train with weights and gradients in the job's dtype and hand-written fp32 master weights."""
    model = job.make_model().to(device)
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    model.to(DTYPES[job.dtype])
    weights: list[Tensor] = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, fused=True, **job.adamw)

    def update() -> None:
        for master, weight in zip(masters, weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(weights, list[Tensor](masters))
        optimizer.zero_grad()

    return Side(_step(model, update), model)


def fsdp2(job: Job, device: torch.device, place: Place) -> Side:
    """Train with `fully_shard` on every block and the model, offloaded if the job offloads states.

    With offload at stage 2, a unit stays unsharded from forward to backward. At stage 3 it is
    all-gathered in both.
    """
    # Imported here, because this import takes half a second and only this side needs it.
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    place.join(device)
    model = job.make_model()
    settings: dict[str, Any] = {"mesh": init_device_mesh(device.type, (place.world_size,))}
    if job.dtype != "fp32":
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=DTYPES[job.dtype])
    if job.is_offloaded:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
        settings["reshard_after_forward"] = job.stage == 3
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return torch_loop(job, model)


def deepspeed(job: Job, device: torch.device, place: Place) -> Side:
    """Train with the installed DeepSpeed, which compiles its Adam at first use.

    On the CPU, DeepSpeed uses its own Adam if states are offloaded, otherwise torch's.
    """
    package: Any = importlib.import_module("deepspeed")
    place.join(device)
    model, optimizer, config = job.make_model(), None, job.deepspeed_config()
    if device.type == "cpu":
        del config["optimizer"]
        config["zero_allow_untested_optimizer"] = True
        if job.is_offloaded:
            adam: Any = importlib.import_module("deepspeed.ops.adam")
            optimizer = adam.DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **job.adamw)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), fused=True, **job.adamw)
    engine, *_ = package.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    return Side(engine_loop(engine), model)


def zero(job: Job, device: torch.device, place: Place) -> Side:
    kept = KeptTier()
    engine = zero_core.build(
        *(job.make_model(), job.config()),
        state_tier=kept if job.is_offloaded else None,
    )
    return Side(engine_loop(engine), engine.module, engine, kept)


SIDES: Mapping[str, Callable[[Job, torch.device, Place], Side]] = {
    "bare": bare,
    "ddp": ddp,
    "torch": plain,
    "torch_masters": plain_masters,
    "fsdp2": fsdp2,
    "deepspeed": deepspeed,
    "zero": zero,
}
NEEDS = {"deepspeed": "deepspeed"}
"""Packages that sides need in addition to this project's."""


def torch_loop(job: Job, model: nn.Module, autocast: str = "") -> Side:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **job.adamw)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Side(_step(model, update, autocast if job.dtype != "fp32" else ""), model)


def _step(model: nn.Module, update: Callable[[], object], autocast: str = "") -> Step:
    """Return a step of forward, backward and ``update``. ``autocast`` is a device type for bf16."""

    def step(ids: Tensor) -> Tensor:
        with torch.autocast(autocast or "cpu", torch.bfloat16, enabled=bool(autocast)):
            loss: Tensor = model(ids)
        torch.autograd.backward(loss)
        update()
        return loss.detach()

    return step


def engine_loop(engine: Any) -> Step:
    def step(ids: Tensor) -> Tensor:
        loss: Tensor = engine(ids)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
