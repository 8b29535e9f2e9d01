"""Tests on a simulated accelerator with delays, in separate processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from support import late_device
from support.late_device.library import LateRanks, LateWorld
from zero_core.testing.ranks import alone, of_size
from zero_core.testing.simulated import TIMEOUT_S, simulate

_T = TypeVar("_T")


def simulate_late(
    program: Callable[..., _T],
    world_size: int,
    *args: Any,
    ranks_per_node: int | None = None,
    timeout_s: float = TIMEOUT_S,
) -> list[_T]:
    """Run ``program`` like `simulate`, on `LateRanks`. Needs a separate process."""

    def run(ranks: LateRanks) -> _T:
        result = program(ranks, *args)
        torch.accelerator.synchronize(ranks.device)  # raises errors of asynchronous jobs here
        return result

    world = LateWorld(world_size, timeout_s)
    return simulate(run, world_size, ranks_per_node=ranks_per_node, network=world)


def on_late_rank(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test on one simulated rank with a late device, the test's first argument."""

    def run(size: int, arguments: dict[str, Any]) -> None:
        late_device.load()
        simulate_late(functools.partial(test, **arguments), size)

    return alone(of_size(test, 1, run))
