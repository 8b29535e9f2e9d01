"""One optimizer step on host memory: cpu-adam, torch, DeepSpeed, torchao, bitsandbytes.

All contenders of a **race** run in one process, on the same memory, in turn: every **round** gives
each its turn, so slow moments of the machine fall on all of them. A turn begins with a rest (the
OpenMP threads of torch spin for a while after a call, and would slow the next contender down) and
one call that is not timed; then come the timed ones. Figures are medians of all timed calls.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor

import cpu_adam
from benchmarks.harness.options import RESULTS, AllThreads, Output
from benchmarks.harness.ranks import Row, write_json
from benchmarks.harness.report import (
    MS,
    Column,
    bars,
    machine,
    make_console,
    reasons,
    save_panels,
    table_of,
)
from benchmarks.harness.rounds import measured
from cpu_adam._isa import use_isa
from zero_engine.machine import cache_bytes

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
FUSED_BYTES = 28
"""Traffic of one fp32 element: weight, two moments in and out, gradient in. Also of the offload
path: the gradient is 2 bytes instead of 4, and the copy 2 more."""
TURN_S = 0.05
"""Small steps are repeated within a turn until they have taken this long..."""
MAX_CALLS = 30
"""...or this often."""
NUM_SMALL, SMALL_NUMEL = 500, 10_000
OURS = "cpu-adam"
BANDWIDTH = "bandwidth, 28 B/element"

Step = Callable[[], object]


@dataclass
class Contender:
    """One side of a race."""

    name: str
    make: Callable[[], Step]
    """Prepares it and returns what takes one step."""
    bar: float | None = None
    """Ours should be at least this many times as fast."""
    times_s: list[float] = field(default_factory=list)
    failure: str = ""
    """Why there are no numbers."""
    step: Step | None = None

    def row(self, ours: Contender) -> Row:
        if self.failure:
            return {"failure": self.failure}
        median_s = statistics.median(self.times_s)
        return {
            "median_s": median_s,
            "min_s": min(self.times_s),
            "num_calls": len(self.times_s),
            "to_ours": median_s / statistics.median(ours.times_s),
            "bar": self.bar,
        }


@dataclass
class Race:
    """Contenders that do the same work, compared with the first one."""

    name: str
    numel: int
    contenders: list[Contender]

    def rows(self) -> dict[str, Row]:
        return {contender.name: contender.row(self.contenders[0]) for contender in self.contenders}


def main(
    numel: Annotated[
        list[int] | None, typer.Option(min=1, help="Elements of the large races; 64 Mi and 1 Mi.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every contender.")] = 9,
    rest_ms: Annotated[float, typer.Option(min=0, help="Rest before each turn.")] = 50.0,
    threads: AllThreads = 0,
    output: Output = RESULTS,
) -> None:
    """Run every race, print tables, write ``cpu_adam.json`` and ``cpu_adam.png``."""
    numels = tuple(numel or (64 * 2**20, 2**20))
    console = make_console()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    before = torch.get_num_threads()
    threads = threads or before
    torch.set_num_threads(threads)
    races: dict[str, dict[str, Row]] = {}
    try:
        for make_race in _races(numels):
            race = make_race()
            console.print(f"{race.name} ...")
            _run(race, rounds, rest_ms / 1e3)
            races[race.name] = rows = race.rows()
            console.print(table(race.name, race.numel, rows), *reasons(rows), sep="\n")
    finally:
        torch.set_num_threads(before)
    output.mkdir(parents=True, exist_ok=True)
    settings = {
        "numels": list(numels),
        "rounds": rounds,
        "rest_s": rest_ms / 1e3,
        "threads": threads,
    }
    report = {"settings": settings, "machine": _machine(), "races": races}
    write_json(output / "cpu_adam.json", report)
    panels = []
    for name, rows in races.items():
        times = {who: row["median_s"] / MS for who, row in measured(rows).items()}
        draw = lambda axes, times=times: bars(axes, times, "median step (ms)", ours=_is_ours)  # noqa: E731
        panels.append((name, len(times) + 3, draw))
    save_panels(output / "cpu_adam.png", panels, columns=2)
    console.print(f"written to {output}")


def _races(numels: Sequence[int]) -> list[Callable[[], Race]]:
    """Return makers, so that one race's memory is gone before the next one's is there."""
    races: list[Callable[[], Race]] = []
    for numel in numels:
        races += [partial(race, numel) for race in (fp32_race, offload_race, int8_race)]
    return [*races, small_race]


# [Note: shared memory]
# A race's optimizers share parameters, gradients and moments: each is a quarter of a gigabyte for
# 64 Mi elements. Everyone's step count is its own.


class Flat:
    """fp32 parameters, gradients and moments, of ``count`` tensors."""

    def __init__(self, numel: int, count: int = 1) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params = [_random(numel, generator) for _ in range(count)]
        self.exp_avg = [torch.zeros(numel) for _ in range(count)]
        self.exp_avg_sq = [torch.zeros(numel) for _ in range(count)]
        for param in self.params:
            param.grad = _random(numel, generator).mul_(1e-2)

    @property
    def grads(self) -> list[Tensor]:
        return [param.grad for param in self.params if param.grad is not None]

    def lend(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> Step:
        """Return ``optimizer.step``, on these moments."""
        for param, first, second in zip(self.params, self.exp_avg, self.exp_avg_sq, strict=True):
            optimizer.state[param].update(step=step(), exp_avg=first, exp_avg_sq=second)
        return optimizer.step

    def ours(self, isa: str | None = None) -> Step:
        step = self.lend(cpu_adam.CPUAdam(self.params, **ADAMW), _tensor_step)
        return step if isa is None else _with_isa(isa, step)

    def torch(self, **how: Any) -> Step:
        return self.lend(torch.optim.AdamW(self.params, **ADAMW, **how), _tensor_step)

    def deepspeed(self) -> Step:
        """DeepSpeed's, which compiles itself first."""
        adam: Any = importlib.import_module("deepspeed.ops.adam")
        return self.lend(adam.DeepSpeedCPUAdam(self.params, adamw_mode=True, **ADAMW), int)

    def bandwidth(self) -> Step:
        """Read and write as AdamW does, in three torch calls that compute next to nothing."""

        def step() -> None:
            for param, grad, first, second in zip(
                self.params, self.grads, self.exp_avg, self.exp_avg_sq, strict=True
            ):
                param.mul_(1.0)  # 8 bytes per element
                second.mul_(1.0)  # 8
                first.add_(grad, alpha=1e-6)  # 12

        return step


def fp32_race(numel: int) -> Race:
    flat = Flat(numel)
    return Race(
        f"fp32 AdamW, {_size(numel)}",
        numel,
        [
            Contender(OURS, flat.ours),
            *_by_isa(flat.ours, numel),
            Contender(BANDWIDTH, flat.bandwidth, 0.97),
            Contender("torch fused", lambda: flat.torch(fused=True), 0.97),
            Contender("torch foreach", lambda: flat.torch(foreach=True)),
            Contender("torch for-loop", lambda: flat.torch(foreach=False, fused=False), 7.0),
            Contender("DeepSpeedCPUAdam", flat.deepspeed, 1.0),
        ],
    )


def small_race() -> Race:
    """AdamW on many small tensors: the cost of a call decides."""
    flat = Flat(SMALL_NUMEL, NUM_SMALL)
    return Race(
        f"fp32 AdamW, {NUM_SMALL} x {SMALL_NUMEL}",
        NUM_SMALL * SMALL_NUMEL,
        [
            Contender(OURS, flat.ours),
            Contender("torch fused", lambda: flat.torch(fused=True), 1.0),
            Contender("torch foreach", lambda: flat.torch(foreach=True)),
            Contender("torch for-loop", lambda: flat.torch(foreach=False, fused=False), 3.0),
            Contender("DeepSpeedCPUAdam", flat.deepspeed),
        ],
    )


def offload_race(numel: int) -> Race:
    """16-bit gradient in, unscaled and clipped, 16-bit parameter out.

    DeepSpeed has the gradient in fp32 by then, so its sides start with that: its own
    ``unscale_and_clip_grads``, its own Adam, and the cast that its ZeRO optimizer makes.
    """
    flat = Flat(numel)
    (param,), (grad,) = flat.params, flat.grads
    half_grad = grad.to(torch.bfloat16)
    half = param.detach().to(torch.bfloat16)

    def ours(isa: str | None = None, dtype: torch.dtype = torch.bfloat16) -> Step:
        count = iter(range(1, 2**31))
        source, copy = half_grad.to(dtype), half.to(dtype)  # bf16: the same memory

        def step() -> None:
            beta1, beta2 = ADAMW["betas"]
            cpu_adam.adam_step(
                param,
                source,
                flat.exp_avg[0],
                flat.exp_avg_sq[0],
                step=next(count),
                lr=ADAMW["lr"],
                beta1=beta1,
                beta2=beta2,
                eps=ADAMW["eps"],
                weight_decay=ADAMW["weight_decay"],
                grad_scale=0.999,
                out=copy,
            )

        return step if isa is None else _with_isa(isa, step)

    def deepspeed() -> Step:
        zero: Any = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2")
        adam = flat.deepspeed()
        settings = SimpleNamespace(clip_grad=1.0, loss_scale=1.0, device=torch.device("cpu"))
        norm = torch.tensor(1.0001)  # clipped a little, or the gradients would be gone soon

        def step() -> None:
            zero.DeepSpeedZeroOptimizer.unscale_and_clip_grads(settings, [grad], norm)
            adam()
            half.copy_(param)

        return step

    def torch_passes() -> Step:
        adam = flat.torch(fused=True)

        def step() -> None:
            grad.copy_(half_grad)
            grad.mul_(0.999)
            adam()
            half.copy_(param)

        return step

    return Race(
        f"offload path, {_size(numel)}",
        numel,
        [
            Contender(OURS, ours),
            *_by_isa(ours, numel),
            Contender(f"{OURS}, fp16", partial(ours, dtype=torch.float16)),
            Contender(BANDWIDTH, flat.bandwidth, 0.9),
            Contender("DeepSpeed: unscale + CPUAdam + cast", deepspeed, 1.4),
            Contender("torch: widen + unscale + fused + cast", torch_passes),
        ],
    )


def int8_race(numel: int) -> Race:
    """AdamW with 8-bit moments on bf16 parameters, and torch's fused fp32 as a measure."""
    generator = torch.Generator().manual_seed(0)

    def bf16() -> list[torch.nn.Parameter]:
        param = torch.nn.Parameter(_random(numel, generator).to(torch.bfloat16))
        param.grad = _random(numel, generator).mul_(1e-2).to(torch.bfloat16)
        return [param]

    def ours(isa: str | None = None) -> Step:
        optimizer: Any = cpu_adam.CPUAdam
        made: torch.optim.Optimizer = optimizer(bf16(), state_dtype="int8", **ADAMW)
        return made.step if isa is None else _with_isa(isa, made.step)

    def peer(module: str, name: str) -> Callable[[], Step]:
        def make() -> Step:
            package: Any = importlib.import_module(module)
            optimizer: torch.optim.Optimizer = getattr(package, name)(bf16(), **ADAMW)
            return optimizer.step

        return make

    return Race(
        f"8-bit AdamW, {_size(numel)}",
        numel,
        [
            Contender(f"{OURS}, int8", ours),
            *(Contender(f"{OURS}, int8, {isa}", partial(ours, isa)) for isa in _other_isas()),
            Contender("torch fused, fp32", lambda: Flat(numel).torch(fused=True), 1.0),
            Contender("torchao AdamW8bit", peer("torchao.optim", "AdamW8bit"), 25.0),
            Contender("bitsandbytes AdamW8bit", peer("bitsandbytes.optim", "AdamW8bit"), 25.0),
        ],
    )


def _run(race: Race, rounds: int, rest_s: float) -> None:
    for contender in race.contenders:
        if race.contenders[0].failure:
            contender.failure = "not run: there is nothing to compare it with"
            continue
        try:
            contender.step = contender.make()
            contender.step()
        # Another package's failure, of whatever kind, is a result like any other.
        except Exception as error:
            contender.failure = _explain(error)
    for _ in range(rounds):
        for contender in race.contenders:
            if not contender.failure:
                _take_turn(contender, rest_s)
    for contender in race.contenders:
        contender.step = None
        contender.make = _nothing  # it may hold the race's memory
    gc.collect()


def _nothing() -> Step:
    raise AssertionError("the race is over")


def _take_turn(contender: Contender, rest_s: float) -> None:
    assert contender.step is not None
    time.sleep(rest_s)
    contender.step()
    begin = time.perf_counter()
    for _ in range(MAX_CALLS):
        start = time.perf_counter()
        contender.step()
        end = time.perf_counter()
        contender.times_s.append(end - start)
        if end - begin > TURN_S:
            return


def _explain(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        package = error.name.partition(".")[0]
        return f"{package} is not installed: pip install {package}"
    lines = str(error).splitlines() or [type(error).__name__]
    return f"failed: {lines[0]}"


def _by_isa(make: Callable[[str], Step], numel: int) -> list[Contender]:
    """Return the same with the other vector instruction sets that work here.

    They should be as fast where memory sets the pace: not where all of it is in the caches.
    """
    bar = 0.9 if numel * FUSED_BYTES > cache_bytes() else None
    return [Contender(f"{OURS}, {isa}", partial(make, isa), bar) for isa in _other_isas()]


def _other_isas() -> list[str]:
    return [isa for isa in cpu_adam.available_isas()[1:] if isa != cpu_adam.active_isa()]


def _tensor_step() -> Tensor:
    return torch.tensor(0.0)


def _with_isa(isa: str, step: Step) -> Step:
    def run() -> None:
        with use_isa(isa):
            step()

    return run


def _random(numel: int, generator: torch.Generator) -> Tensor:
    return torch.randn(numel, generator=generator)


def _size(numel: int) -> str:
    return f"{numel >> 20} Mi" if numel % 2**20 == 0 else f"{numel}"


def table(name: str, numel: int, rows: Mapping[str, Row]) -> Table:
    named = {who: {"name": who, **row} for who, row in rows.items()}
    columns = (
        Column("median", "median_s", ".2f", MS),
        Column("min", "min_s", ".2f", MS),
        Column("GB/s", lambda row: numel * FUSED_BYTES / row["median_s"], ".1f", 1e9),
        Column("to ours", "to_ours", ".2f"),
        Column("bar", "bar", "g"),
        Column("", is_met),
    )
    return table_of(
        named,
        columns,
        heading="contender",
        title=f"{name} elements",
        caption="ms; GB/s at 28 B per element; the ratio should reach the bar",
    )


def is_met(row: Mapping[str, Any]) -> bool | None:
    """Return whether the bar is reached, by our own instruction sets in speed relative to ours."""
    if row["bar"] is None:
        return None
    speed = 1.0 / row["to_ours"] if _is_ours(row["name"]) else row["to_ours"]
    return bool(speed >= row["bar"])


def _is_ours(name: str) -> bool:
    return name.startswith(OURS)


def _machine() -> Row:
    versions = {}
    for name in ("torch", "deepspeed", "torchao", "bitsandbytes"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    isa = {
        "isa": cpu_adam.active_isa(),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "not set"),
    }
    return {**machine(), **isa, **versions}
