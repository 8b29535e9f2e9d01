"""Measurements of a layer of a run's size, where the report is made on the machine of the run.

What a step's time depends on cannot be read off one run: how it scales with threads, and with rows
of a matrix product. A linear layer's forward and backward of the same size, with the gradient added
up, tells it within a second.

[Note: a busy machine]
While other programs take the cores, a second thread makes nothing faster, and no time is that of
the run. The system counts for how long threads were ready and had no core. Beyond `_MOST_WAITED`
how a layer scales with threads is not known, and the processor's time stands for the clock's.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from zero_core.config import OptimizerConfig
from zero_core.optim.factory import is_elementwise, make_optimizer
from zero_core.record.environment import available_cores
from zero_core.record.records import RunRecord
from zero_engine.machine import cache_bytes
from zero_engine.report.measured import Measured

_BUDGET_S = 0.5
_LEAST_ROUNDS = 3
_MOST_WAITED = 0.1
"""Share of its threads' time that a layer may have waited for a core."""
_LEAST_COPIES = 2
_CACHES = 2
"""Weights of this many times the largest cache are kept by none."""
_MOST_PRODUCTS = 2 * 10**10
"""Rows times weights of a turn: some seconds of one core."""
_MOST_ELEMENTS = 2**24
"""Of an update: no cache keeps its states."""


class _Timed(NamedTuple):
    """Median times of a turn of work. As a run's: the least ones are of a few lucky turns.

    Attributes:
        seconds: by the clock.
        processor_s: of all threads.
        is_disturbed: see [Note: a busy machine].
    """

    seconds: float
    processor_s: float
    is_disturbed: bool


def threads_scaling(found: Measured, threads: int) -> float | None:
    """Return how many times as fast a layer is with ``threads`` as with the run's.

    None if the run is not of this machine, or this machine is busy.
    """
    size = _size(found)
    if size is None:
        return None
    copies = _copies(found, size[0], size[1] * size[2])
    now = _time(*size, copies, int(found.run.run.environment["threads"]))
    then = _time(*size, copies, threads)
    return None if now.is_disturbed or then.is_disturbed else now.seconds / then.seconds


def batch_scaling(found: Measured, factor: int) -> float | None:
    """Return the time of ``factor`` times the rows at once, over that of the rows by turns."""
    size = _size(found)
    if size is None:
        return None
    rows, out_features, in_features = size
    threads = int(found.run.run.environment["threads"])
    copies = _copies(found, rows * factor, out_features * in_features)
    single = _time(rows, out_features, in_features, copies, threads)
    whole = _time(rows * factor, out_features, in_features, copies, threads)
    if single.is_disturbed or whole.is_disturbed:
        return whole.processor_s / (factor * single.processor_s)
    return whole.seconds / (factor * single.seconds)


def update_s(found: Measured) -> float | None:
    """Return the seconds that torch's update by the run's optimizer takes here per element.

    None if the run is not of this machine's CPU, or its configuration names no optimizer whose time
    is one per element.
    """
    run = found.run.run
    if not _is_here(found) or not run.config.get("optimizer"):
        return None
    numel, threads = min(run.num_parameters, _MOST_ELEMENTS), int(run.environment["threads"])
    timed = _time_update(json.dumps(run.config["optimizer"]), numel, threads)
    if timed is None:
        return None
    return (timed.processor_s if timed.is_disturbed else timed.seconds) / numel


def _size(found: Measured) -> tuple[int, int, int] | None:
    """Return rows, outputs and inputs of a layer of the run, if it is of this machine's CPU."""
    run, steps = found.run.run, found.run.ranks[0].steps
    shape = steps[-1].input_shape if steps else ()
    if not _is_here(found) or not shape or not run.matrix:
        return None
    tokens = run.config["train_micro_batch_size_per_gpu"]
    rows = shape[0] * shape[1] if len(shape) == 2 else shape[0]
    return max(rows, tokens), run.matrix[0], run.matrix[1]


def is_of_this_machine(run: RunRecord) -> bool:
    """Whether a run was recorded on this host, with as many cores as there are now."""
    environment = run.environment
    is_same = environment.get("host") == platform.node()
    return is_same and environment.get("cores") == available_cores()


def _is_here(found: Measured) -> bool:
    run = found.run.run
    return is_of_this_machine(run) and run.environment.get("device") == "cpu"


def _copies(found: Measured, rows: int, layer: int) -> int:
    """Return how many layers keep a cache from holding their weights, as the model's are not kept.

    Fewer where a turn would take seconds: so many rows are bound by arithmetic.
    """
    held = min(found.run.run.num_parameters, _CACHES * cache_bytes() // 4)
    return max(_LEAST_COPIES, min(held // layer, _MOST_PRODUCTS // (rows * layer)))


@cache
def _time(rows: int, out_features: int, in_features: int, copies: int, threads: int) -> _Timed:
    """Return the median times of linear layers' forward and backward."""
    with torch.random.fork_rng(devices=[]):
        layers = [nn.Linear(in_features, out_features) for _ in range(copies)]
        x = torch.randn(rows, in_features, requires_grad=True)

    def turn() -> None:
        # One backward for all: as in a model, a weight's gradient finds no cache that holds it.
        torch.autograd.backward([layer(x).sum() for layer in layers])

    return _median(turn, threads)


@cache
def _time_update(config: str, numel: int, threads: int) -> _Timed | None:
    """Return the median times of a step of an optimizer, or None if it has no time per element."""
    param = nn.Parameter(torch.zeros(numel))
    param.grad = torch.full_like(param, 1e-3)
    optimizer = make_optimizer(OptimizerConfig(**json.loads(config)), [param])
    return _median(optimizer.step, threads) if is_elementwise(type(optimizer)) else None


def _median(turn: Callable[[], object], threads: int) -> _Timed:
    """Return the median times of a turn of work."""
    with _threads(threads):
        seconds: list[float] = []
        processor_s: list[float] = []
        waited, began = waited_s(), time.perf_counter()
        while len(seconds) < _LEAST_ROUNDS or time.perf_counter() < began + _BUDGET_S:
            start, used = time.perf_counter(), time.process_time()
            turn()
            seconds.append(time.perf_counter() - start)
            processor_s.append(time.process_time() - used)
        passed = (time.perf_counter() - began) * threads
    return _Timed(median(seconds), median(processor_s), waited_s() - waited > _MOST_WAITED * passed)


def waited_s() -> float:
    """Return for how long threads of this process were ready and had no core, 0 if unknown."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # a thread that has ended, or no statistics
            total += int(path.read_text(encoding="ascii").split()[1])
    return total / 1e9


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
