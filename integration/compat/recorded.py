"""What a program's own loop records of its steps, on this rank.

with recorded.step() as step:
    ...
    step.loss = loss
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class Step:
    """One optimizer step; its loop sets ``loss``."""

    loss: torch.Tensor | float = float("nan")


@dataclass
class Recorded:
    """Losses and seconds of the steps, in order."""

    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)


FOUND = Recorded()


@contextmanager
def step() -> Iterator[Step]:
    """Time one optimizer step."""
    begun, one = time.perf_counter(), Step()
    yield one
    FOUND.losses.append(float(one.loss))  # waits for the device, as a log of each step does
    FOUND.step_seconds.append(time.perf_counter() - begun)
