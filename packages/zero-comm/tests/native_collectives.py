"""Collectives for the tests to wrap: one over a real process group, one that delays everything."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zero_comm.torch_compat import all_gather_single


class Deferred:
    """A work whose effect happens at its first ``wait``."""

    def __init__(self, effect: Callable[[], None]) -> None:
        self._effect: Callable[[], None] | None = effect

    def wait(self) -> None:
        if self._effect is not None:
            effect, self._effect = self._effect, None
            effect()


@dataclass
class Call:
    """What an all_gather was asked to do."""

    nbytes: int
    dtype: Any
    unit: int
    version: int
    backward: bool


@dataclass
class DelayedNative:
    """Pretends that all ranks hold the same shard, and reads it as late as it's allowed to."""

    world_size: int = 1
    calls: list[Call] = field(default_factory=list)
    reductions: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> Deferred:
        self.calls.append(Call(shard.nbytes, shard.dtype, unit, version, backward))
        return Deferred(lambda: void(out.view(self.world_size, -1).copy_(shard.clone())))

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Deferred:
        self.reductions.append((out, full, unit))
        return Deferred(lambda: void(out.copy_(full.view(self.world_size, -1).sum(0))))


class GroupNative:
    """The default process group, asynchronously; counts the bytes of its own shards."""

    def __init__(self) -> None:
        self.sent_nbytes = 0

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> Any:
        self.sent_nbytes += shard.nbytes
        parts = list(out.chunk(dist.get_world_size()))
        return dist.all_gather(parts, shard, async_op=True)

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Deferred:
        parts = full.new_empty(dist.get_world_size(), full.numel())
        all_gather_single(parts.view(-1), full, None)
        mine = parts.view(len(parts), len(parts), -1)[:, dist.get_rank()]
        return Deferred(lambda: void(out.copy_(mine.sum(0))))


def void(_: object) -> None:
    """Drop the value of an expression."""
