"""For tests of this package and of others: ranks on one machine, a model with every difficulty in
it, and the DDP run that the engine is compared with.

`spawn` runs a function on several gloo ranks. `Hard` is a small model with what trips partitioning
up: tied weights, a frozen block, a block called twice, branches that differ between ranks and
steps, odd sizes and a parameter smaller than the world. `run_ddp` trains it with
DistributedDataParallel and a torch optimizer, `run_engine` with the engine; both return what can be
compared.
"""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

# The first torch optimizer imports it. Imported while a process group exists, it keeps the group
# alive past destroy_process_group (torch 2.13), whose threads may then abort the process at exit.
import torch._dynamo
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zero_core
from zero_core.topology import find_ranks

__all__ = [
    "Case",
    "Gap",
    "Hard",
    "Trace",
    "batch",
    "compare_with_ddp",
    "make_model",
    "preload",
    "read_gaps",
    "run_alone",
    "run_ddp",
    "run_engine",
    "spawn",
]

LR, WEIGHT_DECAY = 1e-2, 0.1


_PRELOADED = [__name__]


def preload(*modules: str) -> None:
    """Have the server that ranks are forked from import ``modules`` once, by name.

    Before the first `spawn` of a process: it saves every rank the import. One that cannot be
    imported is left to those that ask for it.
    """
    _PRELOADED.extend(modules)


def spawn(
    worker: Callable[..., None],
    world_size: int,
    *args: Any,
    ranks_per_node: int | None = None,
    backend: str = "gloo",
) -> None:
    """Run ``worker(rank, world_size, *args)`` on gloo ranks; raises if one of them does.

    ``worker`` is a module-level function. The ranks meet over a file, not a port. They are forked
    from a server that has imported torch once and run nothing, which saves seconds per call.
    With ``ranks_per_node`` the engine takes so many of them for a node, as torchrun would tell it.
    With ``backend="cpu:gloo,cuda:gloo"``, say, they compute on one accelerator, which they share.
    """
    multiprocessing.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
            _run_rank,
            (worker, world_size, str(Path(folder) / "store"), ranks_per_node, backend, args),
            world_size,
            start_method="forkserver",
        )


def run_alone(worker: Callable[..., None], *args: Any) -> None:
    """Run ``worker(*args)`` in one process forked as `spawn`'s are, without a process group."""
    multiprocessing.set_forkserver_preload(_PRELOADED)
    mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
        _run_alone, (worker, args), 1, start_method="forkserver"
    )


def _run_alone(index: int, worker: Callable[..., None], args: tuple[Any, ...]) -> None:
    gc.freeze()
    torch.set_num_threads(1)
    worker(*args)


def _run_rank(
    rank: int,
    worker: Callable[..., None],
    world_size: int,
    store: str,
    ranks_per_node: int | None,
    backend: str,
    args: tuple[Any, ...],
) -> None:
    gc.freeze()  # the collector need not look at what the server has imported (0.2 s each time)
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank % (ranks_per_node or world_size))
    if ranks_per_node is not None:
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world_size
    )
    try:
        worker(rank, world_size, *args)
    finally:
        gc.collect()  # whoever still holds the group would end its threads only at exit
        dist.destroy_process_group()


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)
        self.side = nn.Linear(width, width)

    def forward(self, x: Tensor, *, use_side: bool) -> Tensor:
        y = self.norm(x)
        y = self.down(torch.nn.functional.gelu(self.up(y)))
        if use_side:
            y = y + self.side(x)
        total: Tensor = x + y
        return total


class Hard(nn.Module):
    """A language model of ``vocab`` symbols with the difficulties that the module's text lists."""

    def __init__(self, width: int = 11, vocab: int = 37, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.gain = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.frozen = nn.ModuleList([_Block(width)])
        self.sometimes = nn.Parameter(torch.full((width,), 0.1))
        self.never = nn.Parameter(torch.full((5,), 0.5))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, ids: Tensor, *, use_sometimes: bool, use_side: bool) -> dict[str, Tensor]:
        """Loss of predicting each symbol from the one before.

        Args:
            ids: int64, [batch, length].
            use_sometimes: whether the parameter ``sometimes`` takes part.
            use_side: whether each block's side branch takes part (may differ between ranks).
        """
        x = self.embed(ids[:, :-1]) * self.gain
        for block in (*self.blocks, *self.frozen, self.blocks[0]):
            x = block(x, use_side=use_side)
        if use_sometimes:
            x = x + self.sometimes
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


@dataclass(frozen=True)
class Case:
    """One point of the equivalence grid.

    Attributes:
        stage: ZeRO stage.
        dtype: "fp32", "bf16", or "fp16", whose first steps overflow the largest loss scale.
        accumulation: micro-steps per step.
        clipping: largest gradient norm; 0 is off.
        is_local: whether micro-steps before the last run within ``no_sync``.
        zero: further keys of ``zero_optimization``.
        top: further keys of the configuration, and others for some.
        num_backwards: backwards per micro-step, each of an equal part of the loss.
        width: of the model; odd unless given.
    """

    stage: int = 0
    dtype: str = "fp32"
    accumulation: int = 1
    clipping: float = 0.0
    is_local: bool = False
    zero: Mapping[str, Any] = field(default_factory=dict)
    top: Mapping[str, Any] = field(default_factory=dict)
    num_backwards: int = 1
    width: int = 11

    def config(self) -> dict[str, Any]:
        """The engine's configuration."""
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "bf16": {"enabled": self.dtype == "bf16"},
            "fp16": {"enabled": self.dtype == "fp16", "hysteresis": 1},  # as torch's GradScaler
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
            "zero_optimization": {"stage": self.stage, **self.zero},
            **self.top,
        }


@dataclass
class Trace:
    """What a run leaves.

    Attributes:
        losses: of every micro-step, on this rank.
        values: final values by name.
        num_skipped: steps that were skipped as their gradient was not finite.
        between_nodes_bytes: what this rank's engine sent to other nodes in the last step.
    """

    losses: list[float] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    num_skipped: int = 0
    between_nodes_bytes: int = 0


def batch(step: int, micro: int, rank: int) -> dict[str, Any]:
    """The input of one micro-step of one rank, on the CPU: a pure function of its arguments."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return {
        "ids": torch.randint(0, 37, (2, 9), generator=generator),
        "use_sometimes": step % 3 == 1,
        "use_side": (step + rank) % 2 == 0 if step != 4 else rank == 0,
    }


def _batch_on(device: torch.device, step: int, micro: int, rank: int) -> dict[str, Any]:
    inputs = batch(step, micro, rank)
    return {**inputs, "ids": inputs["ids"].to(device)}


def _device() -> torch.device:
    """Where the ranks of this process's group compute, as the engine finds it."""
    return find_ranks(None, None).device


def make_model(width: int = 11) -> Hard:
    """The same `Hard` every time."""
    torch.manual_seed(0)
    return Hard(width)


def run_ddp(case: Case, rank: int, steps: int) -> Trace:
    """Train with DDP and torch's optimizer, in low precision over fp32 master weights, in fp16 with
    torch's ``GradScaler``.

    Accumulation: within ``no_sync`` if ``case.is_local``, else the reduced gradients of the
    micro-steps are added up. With one rank, the module itself is trained.
    """
    trace = Trace()
    device = _device()
    model = make_model(case.width).to(device)
    masters = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    if case.dtype != "fp32":
        model.to({"bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype])
    is_alone = dist.get_world_size() == 1
    ddp = model if is_alone else DistributedDataParallel(model, find_unused_parameters=True)
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    copies = {n: nn.Parameter(m) for n, m in masters.items()}
    optimizer = _torch_optimizer(case, list(copies.values()))
    scaler = _torch_scaler(case, device)
    for step in range(steps):
        sums: dict[str, Tensor] = {}
        for micro in range(case.accumulation):
            is_last = micro == case.accumulation - 1
            is_quiet = case.is_local and not is_last and not is_alone
            with ddp.no_sync() if is_quiet else nullcontext():  # type: ignore[operator]
                loss = ddp(**_batch_on(device, step, micro, rank))["loss"]
                scaler.scale(loss / case.accumulation).backward()
            trace.losses.append(loss.item())
            if case.is_local and not is_last:
                continue
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
        scaler.step(optimizer)  # or not
        scaler.update()
        trace.num_skipped += scaler.get_scale() < before
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(copies[name])
    trace.values = {n: c.detach().cpu().clone() for n, c in copies.items()}
    return trace


def _torch_scaler(case: Case, device: torch.device) -> torch.amp.GradScaler:
    """What the case's configuration names, of torch's own; does nothing but for fp16."""
    named = case.config()["fp16"]
    return torch.amp.GradScaler(
        device.type,
        init_scale=2.0 ** named.get("initial_scale_power", 16),
        growth_interval=named.get("loss_scale_window", 1000),
        enabled=named["enabled"],
    )


def _torch_optimizer(case: Case, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """What the case's configuration names, of torch's own; AdamW by one fused kernel."""
    named = case.config()["optimizer"]
    options = dict(named["params"])
    kind = named["type"]
    if kind == "Adam" and options.pop("adam_w_mode", True):
        kind = "AdamW"
    if kind == "AdamW":
        return torch.optim.AdamW(params, fused=True, **options)
    if kind == "Lion":
        return zero_core.Lion(params, **options)
    optimizer_class: type[torch.optim.Optimizer] = getattr(torch.optim, kind)
    return optimizer_class(params, **options)


def run_engine(case: Case, rank: int, steps: int, **build_kwargs: Any) -> Trace:
    """Train the same model on the same batches with the engine."""
    trace = Trace()
    device = _device()
    engine = zero_core.build(make_model(case.width), case.config(), **build_kwargs)
    for step in range(steps):
        for micro in range(case.accumulation):
            is_quiet = case.is_local and micro < case.accumulation - 1
            with engine.no_sync() if is_quiet else nullcontext():
                for _ in range(case.num_backwards):
                    loss = engine(**_batch_on(device, step, micro, rank))["loss"]
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


@dataclass(frozen=True)
class Gap:
    """How far an engine run is from DDP's and from the first stage of the same case.

    Attributes:
        loss: largest difference of a loss from DDP's on this rank.
        value: largest difference of a final value from DDP's.
        across_stages: largest difference of a loss or value from the first engine run of a case
            that differs only in its stage and ``zero`` keys.
    """

    loss: float
    value: float
    across_stages: float


def compare_with_ddp(
    rank: int, world_size: int, cases: list[Case], folder: str, steps: int
) -> None:
    """For `spawn`: run every case and DDP's of it; write ``{index: Gap}`` as JSON per rank."""
    references: dict[tuple[Any, ...], Trace] = {}
    firsts: dict[tuple[Any, ...], Trace] = {}
    gaps: dict[int, dict[str, float]] = {}
    for index, case in enumerate(cases):
        key = (case.dtype, case.accumulation, case.clipping, case.is_local)
        if key not in references:
            references[key] = run_ddp(case, rank, steps)
        trace = run_engine(case, rank, steps)
        first = firsts.setdefault(key, trace)
        loss, value = _distance(trace, references[key])
        gaps[index] = asdict(Gap(loss, value, max(_distance(trace, first))))
    (Path(folder) / f"gaps-{world_size}-{rank}.json").write_text(json.dumps(gaps))


def read_gaps(folder: str | Path, world_size: int) -> dict[int, Gap]:
    """The largest gaps over the ranks that `compare_with_ddp` wrote, by case."""
    worst: dict[int, Gap] = {}
    for rank in range(world_size):
        rows = json.loads((Path(folder) / f"gaps-{world_size}-{rank}.json").read_text())
        for key, row in rows.items():
            before = asdict(worst.get(int(key), Gap(0.0, 0.0, 0.0)))
            worst[int(key)] = Gap(**{k: max(v, before[k]) for k, v in row.items()})
    return worst


def _distance(a: Trace, b: Trace) -> tuple[float, float]:
    if a.num_skipped != b.num_skipped:
        return math.inf, math.inf
    losses = [abs(x - y) for x, y in zip(a.losses, b.losses, strict=True)]
    values = [(a.values[k] - b.values[k]).abs().max().item() for k in b.values]
    if not all(math.isfinite(gap) for gap in (*losses, *values)):
        return math.inf, math.inf  # max passes over a NaN that is not the first
    return max(losses), max(values)
