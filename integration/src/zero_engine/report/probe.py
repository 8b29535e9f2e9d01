"""Measurements of a layer of a run's size, where the report is made on the machine of the run.

What a step's time depends on cannot be read off one run: how it scales with threads, and with rows
of a matrix product. A linear layer's forward and backward of the same size, with the gradient added
up, tells it within a second.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import nn

from zero_engine.report.measured import Measured

_BUDGET_S = 0.5
_LEAST_ROUNDS = 3
_COPIES = 4
"""Layers that are used in turn, so that no cache keeps their weights."""


def threads_scaling(found: Measured, threads: int) -> float | None:
    """Return how many times as fast a layer is with ``threads`` as with the run's, or None."""
    size = _size(found)
    if size is None:
        return None
    now = int(found.run.run.environment["threads"])
    return _seconds(*size, now) / _seconds(*size, threads)


def batch_scaling(found: Measured, factor: int) -> float | None:
    """Return the time of ``factor`` times the rows at once, over that of the rows by turns."""
    size = _size(found)
    if size is None:
        return None
    rows, out_features, in_features = size
    threads = int(found.run.run.environment["threads"])
    by_turns = factor * _seconds(rows, out_features, in_features, threads)
    return _seconds(rows * factor, out_features, in_features, threads) / by_turns


def _size(found: Measured) -> tuple[int, int, int] | None:
    """Return rows, outputs and inputs of a layer of the run, if it is of this machine's CPU."""
    run, steps = found.run.run, found.run.ranks[0].steps
    shape = steps[-1].input_shape if steps else ()
    environment = run.environment
    is_here = environment.get("host") == platform.node() and environment.get("device") == "cpu"
    if not is_here or environment.get("cores") != _cores() or not shape or not run.matrix:
        return None
    tokens = run.config["train_micro_batch_size_per_gpu"]
    rows = shape[0] * shape[1] if len(shape) == 2 else shape[0]
    return max(rows, tokens), run.matrix[0], run.matrix[1]


def _cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@cache
def _seconds(rows: int, out_features: int, in_features: int, threads: int) -> float:
    """Return the least seconds of a linear layer's forward and backward."""
    with _threads(threads), torch.random.fork_rng(devices=[]):
        layers = [nn.Linear(in_features, out_features) for _ in range(_COPIES)]
        x = torch.randn(rows, in_features, requires_grad=True)
        best, end, rounds = float("inf"), time.perf_counter() + _BUDGET_S, 0
        while rounds < _LEAST_ROUNDS or time.perf_counter() < end:
            began = time.perf_counter()
            for layer in layers:
                layer(x).sum().backward()
            best = min(best, time.perf_counter() - began)
            rounds += 1
    return best


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
