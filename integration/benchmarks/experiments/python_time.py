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
from collections import Counter
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
    added_s = []
    for turn in range(what.warmup + steps):
        ids = next(batches)
        times = [_thread_seconds(run, ids) for run in (run_bare, run_engine)]
        if turn >= what.warmup:
            added_s.append(times)
        engine.step()
        bare.zero_grad()
    profile = cProfile.Profile()
    for _ in range(steps):
        profile.runcall(run_engine, next(batches))
        engine.step()
    functions = _own_times(profile, steps * passes)
    bare_s, engine_s = (statistics.median(found) for found in zip(*added_s, strict=True))
    return {
        "overhead_us": (engine_s - bare_s) / passes * 1e6,
        "python_us": sum(functions.values()),
        "functions_us": dict(Counter(functions).most_common(NUM_SHOWN)),
    }


def _thread_seconds(run: Callable[[Tensor], None], ids: Tensor) -> float:
    started_at = time.thread_time()
    run(ids)
    return time.thread_time() - started_at


def _own_times(profile: cProfile.Profile, num: int) -> dict[str, float]:
    """Return microseconds of the engine's own functions over ``num``, the profiler taken off."""
    per_call, per_child, per_builtin = _calibrate()
    spent: Counter[tuple[str, int, str]] = Counter()
    for function, (_, num_calls, own_s, _, callers) in _table(profile).items():
        if "zero_core" in function[0]:
            spent[function] += own_s - num_calls * per_call
        cost = per_builtin if function[0] == "~" else per_child
        for caller, (_, num_calls_by, _, _) in callers.items():
            if "zero_core" in caller[0]:
                spent[caller] -= num_calls_by * cost
    return {
        f"{Path(file).name}:{name}:{line}": own_s / num * 1e6
        for (file, line, name), own_s in spent.items()
    }


def _table(profile: cProfile.Profile) -> dict[Any, Any]:
    """Return by function: calls, seconds of its own, and its callers, among others."""
    found: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    return found


def _calibrate() -> tuple[float, float, float]:
    """Return the seconds that the profiler adds to a call, its caller, and a builtin's caller."""

    def empty() -> None:
        return None

    def call(act: Callable[[], object]) -> None:
        for _ in range(NUM_CALIBRATION):
            act()

    def measured(act: Callable[[], object]) -> tuple[dict[str, float], float]:
        profile = cProfile.Profile()
        profile.runcall(call, act)
        own = {name: row[2] / NUM_CALIBRATION for (_, _, name), row in _table(profile).items()}
        started_at = time.perf_counter()
        call(act)
        plain = (time.perf_counter() - started_at) / NUM_CALIBRATION
        return own, max(own["call"] - plain, 0.0)

    with_python, in_caller = measured(empty)
    return with_python["empty"], in_caller, measured([].copy)[1]
