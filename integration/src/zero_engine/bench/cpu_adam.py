"""Host Adam: this package's kernels against torch's, DeepSpeed's, torchao's and bitsandbytes'.

All contenders of a **race** run in one process, on the same memory, in turn: every **round** gives
each its turn, so slow moments of the machine fall on all of them. A turn begins with a rest (the
OpenMP threads of torch spin for a while after a call, and would slow the next contender down) and
one call that is not timed; then come the timed ones. Figures are medians of all timed calls.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor

import cpu_adam
from cpu_adam._isa import use_isa
from zero_engine.machine import cache_bytes, processor_name

__all__ = ["Settings", "compare"]

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
FUSED_BYTES = 28
"""Traffic of one fp32 element: weight, two moments in and out, gradient in. Also of the offload
path: the gradient is 2 bytes instead of 4, and the copy 2 more."""
TURN_S = 0.05
"""Small steps are repeated within a turn until they have taken this long..."""
MAX_CALLS = 30
"""...or this often."""
PAGE_WIDTH = 110
NUM_SMALL, SMALL_NUMEL = 500, 10_000
OURS = "cpu-adam"
BANDWIDTH = "bandwidth, 28 B/element"

Step = Callable[[], object]


@dataclass(frozen=True)
class Settings:
    """What is measured, and how often."""

    numels: tuple[int, ...]
    """Elements of the large races."""
    rounds: int
    rest_s: float
    """Before each turn."""
    threads: int


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

    @property
    def median_s(self) -> float:
        """Median of the timed calls."""
        return statistics.median(self.times_s)


@dataclass
class Race:
    """Contenders that do the same work."""

    name: str
    numel: int
    contenders: list[Contender]
    """The first is the one that the others are compared with."""

    def speedup(self, contender: Contender) -> float:
        """How many times as fast the first contender is."""
        return contender.median_s / self.contenders[0].median_s


def compare(settings: Settings, *, output: Path) -> None:
    """Run every race, print tables, write ``cpu_adam.json`` and ``cpu_adam.png``."""
    console = Console(width=None if sys.stdout.isatty() else PAGE_WIDTH)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    races: list[Race] = []
    try:
        for make_race in _races(settings):
            race = make_race()
            console.print(f"{race.name} ...", highlight=False)
            _run(race, settings)
            _show(race, console)
            races.append(race)
    finally:
        torch.set_num_threads(before)
    output.mkdir(parents=True, exist_ok=True)
    report = {
        "settings": asdict(settings),
        "machine": _machine(),
        "races": {race.name: _summary(race) for race in races},
    }
    (output / "cpu_adam.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _plot(races, output / "cpu_adam.png")
    console.print(f"written to {output}", highlight=False)


def _races(settings: Settings) -> list[Callable[[], Race]]:
    """Makers, so that one race's memory is gone before the next one's is there."""
    races: list[Callable[[], Race]] = []
    for numel in settings.numels:
        races += [partial(race, numel) for race in (fp32_race, offload_race, int8_race)]
    return [*races, small_race]


# [Note: shared memory]
# A race's optimizers all have the same parameters, gradients and moments as their state: a quarter
# of a gigabyte each for 64 Mi elements is enough for once. Everyone's step count is its own.


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
        """The parameters' gradients."""
        return [param.grad for param in self.params if param.grad is not None]

    def lend(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> Step:
        """``optimizer.step``, on these moments."""
        for param, first, second in zip(self.params, self.exp_avg, self.exp_avg_sq, strict=True):
            optimizer.state[param].update(step=step(), exp_avg=first, exp_avg_sq=second)
        return optimizer.step

    def ours(self, isa: str | None = None) -> Step:
        """`cpu_adam.CPUAdam`, with the best instruction set or another."""
        step = self.lend(cpu_adam.CPUAdam(self.params, **ADAMW), _tensor_step)
        return step if isa is None else _with_isa(isa, step)

    def torch(self, **how: Any) -> Step:
        """torch's AdamW, in one of its ways."""
        return self.lend(torch.optim.AdamW(self.params, **ADAMW, **how), _tensor_step)

    def deepspeed(self) -> Step:
        """DeepSpeed's, which compiles itself first."""
        adam: Any = importlib.import_module("deepspeed.ops.adam")
        return self.lend(adam.DeepSpeedCPUAdam(self.params, adamw_mode=True, **ADAMW), int)

    def bandwidth(self) -> Step:
        """Reads and writes what AdamW does, in three torch calls that compute next to nothing."""

        def step() -> None:
            for param, grad, first, second in zip(
                self.params, self.grads, self.exp_avg, self.exp_avg_sq, strict=True
            ):
                param.mul_(1.0)  # 8 bytes per element
                second.mul_(1.0)  # 8
                first.add_(grad, alpha=1e-6)  # 12

        return step


def fp32_race(numel: int) -> Race:
    """AdamW on fp32 memory."""
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
    """AdamW on many small tensors: what counts is what a call costs."""
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
    """AdamW with 8-bit moments on bf16 parameters; and torch's fused fp32, as a measure."""
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


def _run(race: Race, settings: Settings) -> None:
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
    for _ in range(settings.rounds):
        for contender in race.contenders:
            if not contender.failure:
                _take_turn(contender, settings.rest_s)
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
    """The same with the other vector instruction sets that work here.

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


def _show(race: Race, console: Console) -> None:
    """A table of those that were measured, and a line for each that was not."""
    first, *others = race.contenders
    if first.failure:
        console.print(f"not measured: {first.failure}", highlight=False)
        return
    console.print(_table(race))
    for contender in others:
        if contender.failure:
            console.print(f"{contender.name}: {contender.failure}", highlight=False)


def _table(race: Race) -> Table:
    table = Table(
        title=f"{race.name} elements",
        caption="ms; GB/s at 28 B per element; the ratio should reach the bar",
    )
    for heading in ("contender", "median", "min", "GB/s", "to ours", "bar", ""):
        is_name = heading == "contender"
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=True)
    for contender in race.contenders:
        if contender.failure:
            continue
        ratio, bar = race.speedup(contender), contender.bar
        table.add_row(
            contender.name,
            f"{contender.median_s * 1e3:.2f}",
            f"{min(contender.times_s) * 1e3:.2f}",
            f"{race.numel * FUSED_BYTES / contender.median_s / 1e9:.1f}",
            f"{ratio:.2f}",
            "" if bar is None else f"{bar:g}",
            "" if bar is None else "met" if _is_met(contender, ratio) else "missed",
        )
    return table


def _is_met(contender: Contender, ratio: float) -> bool:
    """Whether the bar is reached; for our own other instruction sets it is their speed to ours."""
    assert contender.bar is not None
    speed = 1.0 / ratio if contender.name.startswith(OURS) else ratio
    return speed >= contender.bar


def _summary(race: Race) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for contender in race.contenders:
        if contender.failure:
            summary[contender.name] = {"failure": contender.failure}
            continue
        summary[contender.name] = {
            "median_s": contender.median_s,
            "min_s": min(contender.times_s),
            "num_calls": len(contender.times_s),
            "to_ours": race.speedup(contender),
            "bar": contender.bar,
        }
    return summary


def _machine() -> dict[str, Any]:
    versions = {}
    for name in ("torch", "deepspeed", "torchao", "bitsandbytes"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "isa": cpu_adam.active_isa(),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "not set"),
        **versions,
    }


def _plot(races: Sequence[Race], path: Path) -> None:
    shown = [race for race in races if any(contender.times_s for contender in race.contenders)]
    columns = 2
    rows = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(13, 2.6 * rows), layout="constrained")
    for number, race in enumerate(shown):
        axes = figure.add_subplot(rows, columns, number + 1)
        timed = [contender for contender in race.contenders if contender.times_s]
        colors = ["tab:green" if c.name.startswith(OURS) else "tab:gray" for c in timed]
        bars = axes.barh([c.name for c in timed], [c.median_s * 1e3 for c in timed], color=colors)
        axes.bar_label(bars, fmt="%.4g", padding=3)
        axes.margins(x=0.2)
        axes.invert_yaxis()
        axes.set_title(race.name)
        axes.set_xlabel("median step (ms)")
    figure.savefig(path, dpi=120)
