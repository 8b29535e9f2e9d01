"""DDP oracle: train by DistributedDataParallel and by the engine, and compare.

`run_ddp` trains `Hard` with DistributedDataParallel and a torch optimizer. `run_engine` trains the
same model with the engine. Each returns a `Trace` of comparable results.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zero_core
from zero_core.comm.groups import Ranks
from zero_core.comm.topology import find_ranks
from zero_core.testing.models import batch, make_model
from zero_core.testing.simulated import SimulatedRanks

LR, WEIGHT_DECAY = 1e-2, 0.1


@dataclass(frozen=True)
class Case:
    """One configuration of the equivalence grid."""

    stage: int = 0
    dtype: str = "fp32"  # "fp32", "bf16" or "fp16"; in fp16 the first steps overflow
    accumulation: int = 1  # micro-steps per step
    clipping: float = 0.0  # largest gradient norm; 0: no clipping
    is_local: bool = False  # run all micro-steps but the last within ``no_sync``
    zero: Mapping[str, Any] = field(default_factory=dict)  # further keys of ``zero_optimization``
    top: Mapping[str, Any] = field(default_factory=dict)  # further top-level keys
    num_backwards: int = 1  # backwards per micro-step, each with an equal share of the loss
    width: int = 11  # width of the model; odd by default

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "bf16": {"enabled": self.dtype == "bf16"},
            "fp16": {"enabled": self.dtype == "fp16", "hysteresis": 1},  # as in torch's GradScaler
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
            "zero_optimization": {"stage": self.stage, **self.zero},
            **self.top,
        }

    def build(
        self, ranks: Ranks | None = None, model: nn.Module | None = None, **further: Any
    ) -> Any:
        """Build an engine of ``model`` or `Hard`. ``further``: arguments of `zero_core.build`."""
        module = make_model(self.width) if model is None else model
        return zero_core.build(module, self.config(), process_group=ranks, **further)


@dataclass
class Trace:
    """Comparable results of a run."""

    losses: list[float] = field(default_factory=list)  # one per micro-step, on this rank
    values: dict[str, Tensor] = field(default_factory=dict)  # final values by name
    num_skipped: int = 0  # steps skipped because of non-finite gradients
    between_nodes_bytes: int = 0  # bytes that this rank sent to other nodes in the last step


class SimulatedDDP:
    """DistributedDataParallel over simulated ranks, in plain torch.

    With two ranks, results are bit-identical to DDP's (a test checks this). With more ranks,
    gradients are added in rank order, whereas DDP adds them along a ring. Gradients are reduced
    only by `average_gradients`.
    """

    def __init__(self, module: nn.Module, ranks: SimulatedRanks) -> None:
        self.module = module
        self._control = ranks.connect()
        # Wait until every rank has initialized its model. A later backward may recompute
        # activations, which sets the state of torch's global generator.
        self._control.barrier()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. In training, broadcast rank 0's buffers first."""
        if self.module.training:
            for buffer in self.module.buffers():
                self._control.broadcast(buffer)
        return self.module(*args, **kwargs)

    def average_gradients(self) -> None:
        """Average ``grad`` over the ranks. ``grad`` stays None where no rank has one."""
        params = [p for p in self.module.parameters() if p.requires_grad]
        num_users = self._control.sum(torch.tensor([p.grad is not None for p in params]).int())
        used = [param for param, num in zip(params, num_users.tolist(), strict=True) if num]
        for dtype in dict.fromkeys(param.dtype for param in used):  # one exchange per dtype
            own = [param for param in used if param.dtype == dtype]
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in own]
            parts = [(grad * (1.0 / self._control.world_size)).reshape(-1) for grad in grads]
            total = self._control.sum(torch.cat(parts))
            for param, part in zip(own, torch.split(total, [p.numel() for p in own]), strict=True):
                param.grad = torch.empty_like(param).copy_(part.view(param.shape))


def run_ddp(case: Case, rank: int, steps: int, ranks: SimulatedRanks | None = None) -> Trace:
    """Train with DDP and a torch optimizer over fp32 master weights.

    In fp16, torch's ``GradScaler`` is used. With ``case.is_local``, only the last micro-step of a
    step reduces gradients. Otherwise each micro-step's reduced gradient is added. A single
    rank trains without DDP. With ``ranks``, `SimulatedDDP` replaces DDP.
    """
    trace = Trace()
    device = find_ranks(None, None).device  # the engine would choose the same device
    model = make_model(case.width).to(device)
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    copies = {n: nn.Parameter(p.detach().clone()) for n, p in params.items()}  # fp32 master weights
    if case.dtype != "fp32":
        model.to({"bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype])
    is_alone = ranks is None and dist.get_world_size() == 1
    ddp: Any = model
    if ranks is not None:
        ddp = SimulatedDDP(model, ranks)
    elif not is_alone:
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
    config = case.config()
    kind, options = config["optimizer"]["type"], dict(config["optimizer"]["params"])
    if kind == "Adam" and options.pop("adam_w_mode", True):
        kind = "AdamW"
    if kind == "AdamW":
        options["fused"] = True
    optimizer_class = zero_core.Lion if kind == "Lion" else getattr(torch.optim, kind)
    optimizer: torch.optim.Optimizer = optimizer_class(copies.values(), **options)
    scaler = torch.amp.GradScaler(
        device.type,
        init_scale=2.0 ** config["fp16"].get("initial_scale_power", 16),
        growth_interval=config["fp16"].get("loss_scale_window", 1000),
        enabled=config["fp16"]["enabled"],
    )
    for step in range(steps):
        sums: dict[str, Tensor] = {}
        for micro in range(case.accumulation):
            is_last = micro == case.accumulation - 1
            is_quiet = case.is_local and not is_last and not is_alone
            with ddp.no_sync() if is_quiet and ranks is None else nullcontext():
                loss = ddp(**batch(step, micro, rank))["loss"]
                scaler.scale(loss / case.accumulation).backward()
            trace.losses.append(loss.item())
            if case.is_local and not is_last:
                continue
            if ranks is not None:
                ddp.average_gradients()
            for name, param in params.items():
                if param.grad is not None:
                    grad, param.grad = param.grad.float(), None
                    sums[name] = sums[name] + grad if name in sums else grad.clone()
        for name, copy in copies.items():
            copy.grad = sums.get(name)
        scaler.unscale_(optimizer)
        if case.clipping:
            nn.utils.clip_grad_norm_(copies.values(), case.clipping)
        before = scaler.get_scale()
        scaler.step(optimizer)  # skips steps with non-finite gradients
        scaler.update()
        trace.num_skipped += scaler.get_scale() < before
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(copies[name])
    trace.values = {n: c.detach().cpu().clone() for n, c in copies.items()}
    return trace


def run_engine(
    case: Case, rank: int, steps: int, *, resume_from: str | None = None, **build_kwargs: Any
) -> Trace:
    """Train as `run_ddp` does, with the engine. ``resume_from``: a checkpoint's folder."""
    trace = Trace()
    engine = zero_core.build(make_model(case.width), case.config(), **build_kwargs)
    if resume_from is not None:
        engine.resume(resume_from)
    for step in range(steps):
        for micro in range(case.accumulation):
            is_quiet = case.is_local and micro < case.accumulation - 1
            with engine.no_sync() if is_quiet else nullcontext():
                for _ in range(case.num_backwards):
                    loss = engine(**batch(step, micro, rank))["loss"]
                    engine.backward(loss / case.num_backwards)
            engine.step()
            trace.losses.append(loss.item())
    full = engine.full_state_dict(dtype=torch.float32)
    names = [n for n, p in engine.module.named_parameters() if p.requires_grad]
    trace.values = {name: full[name].cpu() for name in names}
    trace.num_skipped = engine.skipped_steps
    trace.between_nodes_bytes = sum(row.between_nodes_bytes for row in engine.comm_report())
    engine.close()
    return trace


class Gap(NamedTuple):
    """Largest differences of an engine run on one rank."""

    loss: float  # largest difference from DDP's losses
    value: float  # largest difference from DDP's final values
    across_stages: float  # largest difference from the first run with the same DDP reference


def compare_with_ddp(
    rank: int, world_size: int, cases: list[Case], folder: str, steps: int
) -> None:
    """Run every case with the engine and with DDP. Write ``{index: Gap}`` to a file per rank."""
    references: dict[tuple[Any, ...], Trace] = {}
    firsts: dict[tuple[Any, ...], Trace] = {}
    gaps: dict[int, Gap] = {}
    for index, case in enumerate(cases):
        key = (case.dtype, case.accumulation, case.clipping, case.is_local)
        if key not in references:
            references[key] = run_ddp(case, rank, steps)
        trace = run_engine(case, rank, steps)
        first = firsts.setdefault(key, trace)
        gaps[index] = Gap(*_distance(trace, references[key]), max(_distance(trace, first)))
    (Path(folder) / f"gaps-{world_size}-{rank}.json").write_text(json.dumps(gaps))


def read_gaps(folder: str | Path, world_size: int) -> dict[int, Gap]:
    """Read the files of `compare_with_ddp` and return each case's largest gaps over all ranks."""
    worst: dict[int, Gap] = {}
    for rank in range(world_size):
        rows = json.loads((Path(folder) / f"gaps-{world_size}-{rank}.json").read_text())
        for key, row in rows.items():
            worst[int(key)] = Gap(*map(max, row, worst.get(int(key), row)))
    return worst


def _distance(a: Trace, b: Trace) -> tuple[float, float]:
    if a.num_skipped != b.num_skipped:
        return math.inf, math.inf
    losses = [abs(x - y) for x, y in zip(a.losses, b.losses, strict=True)]
    values = [(a.values[k] - b.values[k]).abs().max().item() for k in b.values]
    if not all(math.isfinite(gap) for gap in (*losses, *values)):
        return math.inf, math.inf  # max() can ignore a NaN
    return max(losses), max(values)


def train_unread(
    engine: zero_core.Engine, rank: int, *, steps: int, accumulation: int = 1
) -> tuple[list[float], dict[str, Tensor]]:
    """Train without reading losses, so that the host runs ahead, and close the engine.

    Returns the losses, and the full values by name on the CPU.
    """
    losses = []
    for step, micro in itertools.product(range(steps), range(accumulation)):
        loss = engine(**batch(step, micro, rank))["loss"]
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    values = {name: value.cpu() for name, value in engine.full_state_dict().items()}
    engine.close()
    return [loss.item() for loss in losses], values
