"""One optimizer step on host memory: cpu-adam, torch, DeepSpeed, torchao, bitsandbytes.

All contenders of a race run in one process. They share parameters, gradients and moments, except in
the 8-bit race, where each has its own. Every round gives each contender one turn, so slow moments
of the machine affect all of them. A turn is a pause, one untimed call, and timed calls. The pause
is needed because torch's OpenMP threads keep spinning after a call and would slow the next
contender down. Times are medians and minima over all timed calls. Other figures use the medians.
"""

from __future__ import annotations

import gc
import importlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import cpu_adam
from benchmarks.harness.options import RESULTS, AllThreads, Output, use_threads
from benchmarks.harness.ranks import Row
from benchmarks.harness.report import MS, Column, Rows, Section, bars, green, machine, publish
from benchmarks.harness.rounds import spread, take_turns, version
from cpu_adam._isa import use_isa

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
KERNEL_ADAMW: dict[str, Any] = {
    **{name: ADAMW[name] for name in ("lr", "eps", "weight_decay")},
    **dict(zip(("beta1", "beta2"), ADAMW["betas"], strict=True)),
}
FUSED_BYTES = 28
"""Bytes of memory traffic per fp32 element: weight and two moments in and out, gradient in. The
offload path moves as many: its gradient is 2 bytes smaller, and it writes a 2-byte copy."""
TURN_S = 0.05
"""Seconds after which the timed calls of a turn end."""
MAX_CALLS = 30
"""Maximum number of timed calls in a turn."""
NUMELS = (64 * 2**20, 2**20)
REST_S = 0.05
NUM_SMALL, SMALL_NUMEL = 500, 10_000
OURS = "cpu-adam"
PEERS = ("torch", "deepspeed", "torchao", "bitsandbytes")
BANDWIDTH = "bandwidth, 28 B/element"

Step = Callable[[], object]
Contenders = Mapping[str, tuple[Callable[[], Step], float | None]]
"""Maps a contender's name to a function that prepares its step, and to the minimum ratio of its
time to cpu-adam's (None: no bar). The first contender is cpu-adam."""


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every contender.")] = 9,
    threads: AllThreads = 0,
    output: Output = RESULTS,
) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    races: dict[str, Rows] = {}
    sections: list[Section] = []
    num_threads = use_threads(threads)
    for name, num_elements, make in _races():
        print(f"{name} ...", flush=True)
        races[name] = _run(make(), rounds)
        sections.append(section(name, num_elements, races[name]))
        gc.collect()  # frees the race's memory before the next race allocates its own
    settings = {"numels": NUMELS, "rounds": rounds, "rest_s": REST_S, "threads": num_threads}
    about = {
        **machine(),
        "isa": cpu_adam.active_isa(),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "not set"),
        **{name: version(name) or "not installed" for name in PEERS},
    }
    report = {"settings": settings, "machine": about, "races": races}
    publish(output, "cpu_adam", report, sections, columns=2)


def _races() -> Iterator[tuple[str, int, Callable[[], Contenders]]]:
    for numel in NUMELS:
        size = f"{numel >> 20} Mi"
        for kind, make in (
            ("fp32 AdamW", fp32_race),
            ("offload path", offload_race),
            ("8-bit AdamW", int8_race),
            ("undo log", undo_race),
        ):
            yield f"{kind}, {size}", numel, partial(make, numel)
    yield f"fp32 AdamW, {NUM_SMALL} x {SMALL_NUMEL}", NUM_SMALL * SMALL_NUMEL, small_race


def _run(contenders: Contenders, rounds: int) -> dict[str, Row]:
    """Return a row per contender, with its time relative to cpu-adam's."""
    ours = next(iter(contenders))
    steps: dict[str, Step] = {}
    failures: dict[str, Row] = {}
    for name, (make, _) in contenders.items():
        try:
            if ours in failures:
                raise RuntimeError("not run: there is nothing to compare it with")
            steps[name] = make()
            steps[name]()
        # A failure of another package, of any type, becomes a row.
        except Exception as error:
            lines = str(error).splitlines() or [type(error).__name__]
            why = f"failed: {lines[0]}"
            if isinstance(error, ModuleNotFoundError) and error.name is not None:
                why = f"{error.name.partition('.')[0]} is not installed: nox -s bench installs it"
            failures[name] = {"failure": why}

    def take_turn(name: str, _: int) -> Row:
        if name in failures:
            return failures[name]
        time.sleep(REST_S)
        steps[name]()
        begin = time.perf_counter()
        times: list[float] = []
        while len(times) < MAX_CALLS and time.perf_counter() - begin <= TURN_S:
            start = time.perf_counter()
            steps[name]()
            times.append(time.perf_counter() - start)
        return {"times_s": times}

    found = take_turns(list(contenders), rounds, take_turn)
    times_s = {
        name: [seconds for row in by_round for seconds in row["times_s"]]
        for name, by_round in found.items()
        if name not in failures
    }

    def row(name: str) -> Row:
        times = times_s[name]
        return {
            **spread(times),
            "num_calls": len(times),
            "to_ours": statistics.median(times) / statistics.median(times_s[ours]),
            "bar": contenders[name][1],
        }

    return {name: failures.get(name) or row(name) for name in contenders}


# [Note: shared memory] The optimizers of a race, except those of `int8_race`, share parameters,
# gradients and moments, which take 256 MiB each for 64 Mi elements. Step counts are not shared.


class Flat:
    """``count`` parameters of ``numel`` fp32 elements, with gradients and moments."""

    def __init__(self, numel: int, count: int = 1) -> None:
        draw = partial(torch.randn, numel, generator=torch.Generator().manual_seed(0))
        self.params = [draw() for _ in range(count)]
        self.exp_avg = [torch.zeros(numel) for _ in range(count)]
        self.exp_avg_sq = [torch.zeros(numel) for _ in range(count)]
        for param in self.params:
            param.grad = draw().mul_(1e-2)

    @property
    def grads(self) -> list[Tensor]:
        return [param.grad for param in self.params if param.grad is not None]

    def lend(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> Step:
        """Return ``optimizer.step`` after setting the optimizer's moments to the shared ones."""
        for param, first, second in zip(self.params, self.exp_avg, self.exp_avg_sq, strict=True):
            optimizer.state[param].update(step=step(), exp_avg=first, exp_avg_sq=second)
        return optimizer.step

    def ours(self) -> Step:
        return self.lend(cpu_adam.CPUAdam(self.params, **ADAMW), partial(torch.tensor, 0.0))

    def torch(self, **how: Any) -> Step:
        return self.lend(torch.optim.AdamW(self.params, **ADAMW, **how), partial(torch.tensor, 0.0))

    def deepspeed(self) -> Step:
        adam: Any = importlib.import_module("deepspeed.ops.adam")
        return self.lend(adam.DeepSpeedCPUAdam(self.params, adamw_mode=True, **ADAMW), int)

    def peers(self, *, fused: float, loop: float, deepspeed: float | None) -> Contenders:
        plain = {"foreach": False, "fused": False}
        return {
            "torch fused": (lambda: self.torch(fused=True), fused),
            "torch foreach": (lambda: self.torch(foreach=True), None),
            "torch for-loop": (lambda: self.torch(**plain), loop),
            "DeepSpeedCPUAdam": (self.deepspeed, deepspeed),
        }

    def bandwidth(self) -> Step:
        """Return a step with AdamW's memory traffic and almost no arithmetic."""

        def step() -> None:
            for param, grad, first, second in zip(
                self.params, self.grads, self.exp_avg, self.exp_avg_sq, strict=True
            ):
                param.mul_(1.0)  # moves 8 bytes per element
                second.mul_(1.0)  # moves 8 bytes per element
                first.add_(grad, alpha=1e-6)  # moves 12 bytes per element

        return step


def fp32_race(numel: int) -> Contenders:
    flat = Flat(numel)
    return {
        OURS: (flat.ours, None),
        **_by_isa(OURS, flat.ours, numel),
        BANDWIDTH: (flat.bandwidth, 0.97),
        **flat.peers(fused=0.97, loop=7.0, deepspeed=1.0),
    }


def small_race() -> Contenders:
    """AdamW on many small tensors, where the overhead of a call dominates."""
    flat = Flat(SMALL_NUMEL, NUM_SMALL)
    return {OURS: (flat.ours, None), **flat.peers(fused=1.0, loop=3.0, deepspeed=None)}


def offload_race(numel: int) -> Contenders:
    """Update from a 16-bit gradient with unscaling and clipping, and write a 16-bit parameter.

    DeepSpeed has fp32 gradients at this point. Its contender therefore starts from an fp32 gradient
    and runs DeepSpeed's ``unscale_and_clip_grads``, DeepSpeed's Adam, and the cast of its ZeRO
    optimizer.
    """
    flat = Flat(numel)
    (param,), (grad,) = flat.params, flat.grads
    half_grad = grad.to(torch.bfloat16)
    half = param.detach().to(torch.bfloat16)

    def ours(dtype: torch.dtype = torch.bfloat16) -> Step:
        count = iter(range(1, 2**31))
        # For bf16, `to` returns the tensors themselves.
        source, copy = half_grad.to(dtype), half.to(dtype)

        def step() -> None:
            cpu_adam.adam_step(
                *(param, source, flat.exp_avg[0], flat.exp_avg_sq[0]),
                step=next(count),
                grad_scale=0.999,
                out=copy,
                **KERNEL_ADAMW,
            )

        return step

    def deepspeed() -> Step:
        zero: Any = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2")
        adam = flat.deepspeed()
        settings = SimpleNamespace(clip_grad=1.0, loss_scale=1.0, device=torch.device("cpu"))
        # Clips slightly, because repeated strong clipping would bring the gradients to 0.
        norm = torch.tensor(1.0001)

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

    return {
        OURS: (ours, None),
        **_by_isa(OURS, ours, numel),
        f"{OURS}, fp16": (partial(ours, dtype=torch.float16), None),
        BANDWIDTH: (flat.bandwidth, 0.9),
        "DeepSpeed: unscale + CPUAdam + cast": (deepspeed, 1.4),
        "torch: widen + unscale + fused + cast": (torch_passes, None),
    }


def undo_race(numel: int) -> Contenders:
    """AdamW that keeps the old weights and moments, in the kernel's pass or by separate copies."""
    flat = Flat(numel)
    half_grad = flat.grads[0].to(torch.bfloat16)
    states = (flat.params[0], flat.exp_avg[0], flat.exp_avg_sq[0])
    pairs = [(state, torch.zeros(numel)) for state in states]
    count = iter(range(1, 2**31))

    def update(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        master, *moments = states
        cpu_adam.adam_step(
            *(master, half_grad, *moments), step=next(count), copies=copies, **KERNEL_ADAMW
        )

    def kept_before() -> None:
        for old, copy in pairs:
            copy.copy_(old)
        update(())

    return {
        OURS: (lambda: partial(update, ()), None),
        f"{OURS}, old values kept in its pass": (lambda: partial(update, pairs), None),
        "old values kept before its pass": (lambda: kept_before, None),
    }


def int8_race(numel: int) -> Contenders:
    """AdamW with 8-bit moments on bf16 parameters, with torch's fused fp32 AdamW as reference."""
    draw = partial(torch.randn, numel, generator=torch.Generator().manual_seed(0))

    def bf16() -> list[torch.nn.Parameter]:
        param = torch.nn.Parameter(draw().to(torch.bfloat16))
        param.grad = draw().mul_(1e-2).to(torch.bfloat16)
        return [param]

    def made(module: str, name: str, **settings: Any) -> Step:
        package: Any = importlib.import_module(module)
        optimizer: torch.optim.Optimizer = getattr(package, name)(bf16(), **ADAMW, **settings)
        return optimizer.step

    ours = partial(made, "cpu_adam", "CPUAdam", state_dtype="int8")
    return {
        f"{OURS}, int8": (ours, None),
        **_by_isa(f"{OURS}, int8", ours),
        "torch fused, fp32": (lambda: Flat(numel).torch(fused=True), 1.0),
        "torchao AdamW8bit": (partial(made, "torchao.optim", "AdamW8bit"), 25.0),
        "bitsandbytes AdamW8bit": (partial(made, "bitsandbytes.optim", "AdamW8bit"), 25.0),
    }


def _by_isa(name: str, make: Callable[[], Step], numel: int = 0) -> Contenders:
    """Return contenders for the processor's other instruction sets.

    Only the larger number of elements has a bar, because the smaller one fits into the caches.
    """
    bar = 0.9 if numel == NUMELS[0] else None
    others = [isa for isa in cpu_adam.available_isas()[1:] if isa != cpu_adam.active_isa()]
    return {f"{name}, {isa}": (partial(_with_isa, isa, make), bar) for isa in others}


def _with_isa(isa: str, make: Callable[[], Step]) -> Step:
    step = make()

    def run() -> None:
        with use_isa(isa):
            step()

    return run


def section(name: str, numel: int, rows: Rows) -> Section:
    def is_met(who: str, row: Row) -> bool | None:
        """Return whether the bar is met. cpu-adam's own rows are compared by speed, not time."""
        if row.get("bar") is None:
            return None
        speed = 1.0 / row["to_ours"] if _is_ours(who) else row["to_ours"]
        return bool(speed >= row["bar"])

    columns = (
        Column("median", "median_s", ".2f", MS),
        Column("min", "min_s", ".2f", MS),
        Column("GB/s", lambda row: numel * FUSED_BYTES / row["median_s"], ".1f", 1e9),
        Column("to ours", "to_ours", ".2f"),
        Column("bar", "bar", "g"),
        Column("", "is_met"),
    )
    return Section(
        f"{name} elements",
        {who: {**row, "is_met": is_met(who, row)} for who, row in rows.items()},
        columns,
        "ms; GB/s at 28 B per element; the ratio should reach the bar",
        "contender",
        bars(name, rows, {"": "median_s"}, "median step (ms)", MS, color=green(_is_ours)),
    )


def _is_ours(name: str) -> bool:
    return name.startswith(OURS)
