"""One rank's measurement of the engine's own cost, apart from compute and communication.

[Note: what is measured]
overhead  processor time of forward and backward by the engine's main thread less that of the bare
          model, per unit and pass. The tensors of the model are too small to compute, and the
          collectives do nothing: what is left is Python, and torch's dispatch of the few operations
          that the engine adds (copies of gradients, norms).
Python    of that, the time in the engine's own Python code, from a profile, without what it calls.
          The profiler's own time per call, found on empty functions, is taken off.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zero_core
from benchmarks.harness.job import Job
from benchmarks.harness.models import GptShape
from benchmarks.harness.ranks import Place, Row

SMALL = Job(
    *("", "zero", GptShape(layers=12, width=64, heads=1, vocab=8192, context=8)),
    micro_batch=1,
    steps=0,
    warmup=10,
    ranks=2,
    # The norm of what silent collectives bring is arbitrary.
    top={"check_grad_overflow": False},
)
NUM_SHOWN = 12
NUM_CALIBRATION = 20_000


class _Silent:
    """Collectives that do nothing: what arrives is what was in the buffer."""

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> _Silent:
        return self

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> _Silent:
        return self

    def wait(self) -> None:
        return None


def measure(place: Place, job: Mapping[str, Any], steps: int) -> Row:
    """Return microseconds per unit and pass over ``steps`` steps. See [Note: what is measured]."""
    what = Job.of(job)
    torch.set_num_threads(1)
    place.join()
    engine = zero_core.build(what.make_model(), what.config(), collectives=_Silent())
    bare = what.make_model()
    batches = what.batches(place.rank)

    def run_bare(ids: Tensor) -> None:
        torch.autograd.backward(bare(ids))

    def run_engine(ids: Tensor) -> None:
        engine.backward(engine(ids))

    gc.collect()
    gc.freeze()  # the collector's time is not the engine's
    passes = 2 * len(engine.layout.units)
    times: dict[Callable[[Tensor], None], list[float]] = {run_bare: [], run_engine: []}
    for turn in range(what.warmup + steps):
        ids = next(batches)
        for run, found in times.items():
            started_at = time.thread_time()
            run(ids)
            if turn >= what.warmup:
                found.append(time.thread_time() - started_at)
        engine.step()
        bare.zero_grad()
    profile = cProfile.Profile()
    for _ in range(steps):
        ids = next(batches)
        profile.enable()
        run_engine(ids)
        profile.disable()
        engine.step()
    functions = _own_times(pstats.Stats(profile), steps * passes)
    medians = {run: statistics.median(found) for run, found in times.items()}
    return {
        "overhead_us": (medians[run_engine] - medians[run_bare]) / passes * 1e6,
        "python_us": sum(functions.values()),
        "functions_us": dict(sorted(functions.items(), key=lambda item: -item[1])[:NUM_SHOWN]),
    }


def _own_times(stats: pstats.Stats, num: int) -> dict[str, float]:
    """Return microseconds of the engine's own functions over ``num``, the profiler taken off."""
    per_call, per_child, per_builtin = _calibrate()
    table: dict[Any, Any] = stats.stats  # type: ignore[attr-defined]
    spent: dict[Any, float] = {}
    for function, (_, num_calls, own_s, _, callers) in table.items():
        if "zero_core" in function[0]:
            spent[function] = spent.get(function, 0.0) + own_s - num_calls * per_call
        cost = per_builtin if function[0] == "~" else per_child
        for caller, (_, num_calls_by, _, _) in callers.items():
            if "zero_core" in caller[0]:
                spent[caller] = spent.get(caller, 0.0) - num_calls_by * cost
    return {
        f"{Path(file).name}:{name}:{line}": own_s / num * 1e6
        for (file, line, name), own_s in spent.items()
    }


def _calibrate() -> tuple[float, float, float]:
    """Return the seconds that the profiler adds to a call, its caller, and a builtin's caller."""

    def empty() -> None:
        return None

    def call(act: Callable[[], object]) -> None:
        for _ in range(NUM_CALIBRATION):
            act()

    def own_times(act: Callable[[], object]) -> dict[str, float]:
        profile = cProfile.Profile()
        profile.runcall(call, act)
        table: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
        return {
            name: own_s / NUM_CALIBRATION for (_, _, name), (_, _, own_s, _, _) in table.items()
        }

    def plain(act: Callable[[], object]) -> float:
        started_at = time.perf_counter()
        call(act)
        return (time.perf_counter() - started_at) / NUM_CALIBRATION

    with_python, with_builtin = own_times(empty), own_times([].copy)
    in_caller = max(with_python["call"] - plain(empty), 0.0)
    return with_python["empty"], in_caller, max(with_builtin["call"] - plain([].copy), 0.0)
