"""Collectives with random delays: before they start, within launched jobs and before waits."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import zero_comm
import zero_core
from zero_core.testing import Case, SimulatedRanks, make_model

WIDTH = 33
"""Width of the model, whose gradient shards are large enough to be quantized."""


class Delayed:
    def __init__(self, native: Any, chance: random.Random) -> None:
        self._native = native
        self._chance = chance
        self.rank, self.world_size = native.rank, native.world_size
        self.reduces_in_place = native.reduces_in_place

    def _fall_behind(self) -> None:
        luck = self._chance.random()
        time.sleep(0.0 if luck < 0.6 else 0.001 if luck < 0.95 else 0.01)

    def subgroup(self, ranks: Sequence[int]) -> Delayed:
        return Delayed(self._native.subgroup(ranks), self._chance)

    def coded(self, codec: Any) -> Delayed:
        return Delayed(self._native.coded(codec), self._chance)

    def prepare(self, *wanted: Any) -> None:
        self._native.prepare(*wanted)

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._native.zeros(numel, dtype, device)

    def all_gather(self, out: Tensor, shard: Tensor, **options: Any) -> Slow:
        return self._started(self._native.all_gather, out, shard, kind=Slow, **options)

    def reduce_scatter(self, out: Tensor, full: Tensor, **options: Any) -> Slow:
        start = self._native.reduce_scatter
        return self._started(start, out, full, kind=SlowReduction, **options)

    def all_to_all(self, out: Tensor, parts: Tensor, **options: Any) -> Slow:
        return self._started(self._native.all_to_all, out, parts, kind=Slow, **options)

    def launch(self, job: Callable[[], None], *, is_reduction: bool) -> Slow:
        def late() -> None:
            self._fall_behind()
            job()
            self._fall_behind()

        kind = SlowReduction if is_reduction else Slow
        return kind(self._native.launch(late, is_reduction=is_reduction), self._fall_behind)

    def _started(
        self, start: Callable[..., Any], *args: Any, kind: type[Slow], **options: Any
    ) -> Slow:
        self._fall_behind()
        return kind(start(*args, **options), self._fall_behind)


class Slow:
    def __init__(self, work: Any, fall_behind: Callable[[], None]) -> None:
        self._work = work
        self._fall_behind = fall_behind

    def wait(self) -> None:
        self._fall_behind()
        self._work.wait()


class SlowReduction(Slow):
    """A delayed reduction. It declares the members that the engine's isinstance checks need."""

    @property
    def contributions(self) -> Sequence[Tensor]:
        found: Sequence[Tensor] = self._work.contributions
        return found

    def acknowledge(self) -> Any:
        return self._work.acknowledge()


def delayed_collectives(native: Any, *, rank: int, **options: Any) -> Any:
    delayed = Delayed(native, random.Random(rank))
    return zero_comm.create_collectives(delayed, rank=rank, **options)


def build(
    ranks: SimulatedRanks | None,
    dtype: str,
    zero: Mapping[str, Any],
    *,
    stage: int = 3,
    width: int = WIDTH,
    **top: Any,
) -> zero_core.Engine:
    """Build an engine. With ``zero``, it has zero-comm's collectives with delays."""
    config = Case(stage=stage, dtype=dtype, zero=zero, top=top).config()
    collectives = delayed_collectives if zero else None
    return zero_core.build(make_model(width), config, collectives=collectives, process_group=ranks)
