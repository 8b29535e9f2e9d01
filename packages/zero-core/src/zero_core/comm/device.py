"""Collectives among accelerators, by their library (NCCL, say).

All-gather and all-to-all are the library's; a reduction is an all-to-all and a local sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zero_core.comm.control import all_gather_single, sum_in_rank_order
from zero_core.comm.host import HostCollectives, check_all_to_all, check_subgroup
from zero_core.comm.meter import GRADIENTS, PARAMETERS, Links, Meter
from zero_core.comm.p2p import ProcessMessages
from zero_core.comm.queues import CommQueues
from zero_core.protocols import EXACT_GRADIENTS, TransportCollectives, Work


class DeviceCollectives:
    """`zero_core.protocols.TransportCollectives` of an accelerator. See there for the contract."""

    reduces_in_place = False

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        rank: int,
        links: Links,
        queues: CommQueues,
        meter: Meter | None = None,
    ) -> None:
        """Every rank of ``group`` must call it.

        Args:
            group: None means the default group.
            rank: this rank within the group.
            links: how many ranks there are, and where.
            queues: where jobs run.
            meter: counts what is sent.
        """
        self.rank = rank
        self.world_size = links.world_size
        self._group = group
        self._members = dist.get_process_group_ranks(group)
        # Where a block's parameter is unused on one rank only, reductions and gathers interleave
        # differently there: each queue has a group of its own.
        self._reduce_group = _new_group(self._members)
        self._queues = queues
        self._links = links
        self._meter = Meter() if meter is None else meter
        self._scratch: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def subgroup(self, ranks: Sequence[int]) -> TransportCollectives:
        check_subgroup(ranks, self.rank, self.world_size)
        if len(ranks) == 1:  # nothing to send
            return HostCollectives(
                ProcessMessages(None),
                rank=0,
                world_size=1,
                queues=self._queues,
                meter=self._meter,
            )
        return DeviceCollectives(
            _new_group([self._members[r] for r in ranks]),
            rank=list(ranks).index(self.rank),
            links=self._links.among(ranks),
            queues=self._queues,
            meter=self._meter,
        )

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.inference_mode(False):  # it serves training too
            return torch.zeros(numel, dtype=dtype, device=device)

    def launch(self, job: Callable[[], None], *, is_reduction: bool) -> Work:
        return self._queues.launch(job, is_reduction=is_reduction)

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> Work:
        content = GRADIENTS if version == EXACT_GRADIENTS else PARAMETERS
        self._meter.add("all_gather", content, self._links.gather(shard.nbytes))
        own = out.view(self.world_size, -1)[self.rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        work = all_gather_single(out, shard, group=self._group, async_op=True)
        return cast(Work, work)

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        sent = self._links.direct(full.nbytes // self.world_size)
        self._meter.add("reduce_scatter", GRADIENTS, sent)
        free = self._scratch.setdefault((full.numel(), full.dtype), [])
        received = free.pop() if free else torch.empty_like(full)
        parts = list(received.view(self.world_size, -1))
        work = self._swap(received, full)

        return _DeviceReduction(work, out, received, parts, free)

    def all_to_all(self, out: Tensor, parts: Tensor, *, unit: int) -> Work:
        check_all_to_all(out, parts, self.world_size)
        sent = self._links.direct(parts.nbytes // self.world_size)
        self._meter.add("all_to_all", GRADIENTS, sent)
        return self._swap(out, parts)

    def _swap(self, out: Tensor, parts: Tensor) -> Work:
        work: Any = dist.all_to_all_single(out, parts, group=self._reduce_group, async_op=True)
        return cast(Work, work)


class _DeviceReduction:
    """An all-to-all under way, and the sum that follows it: `zero_core.protocols.Reduction`."""

    def __init__(
        self,
        work: Work,
        out: Tensor,
        received: Tensor,
        parts: Sequence[Tensor],
        free: list[Tensor],
    ) -> None:
        self.contributions = parts
        self._work: Work | None = work
        self._out = out
        self._received = received
        self._free = free

    def wait(self) -> None:
        """Sum in rank order. Once."""
        if self._work is not None:
            work, self._work = self._work, None
            work.wait()
            sum_in_rank_order(self._out, self.contributions)
            self._free.append(self._received)


def _new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A group of global ``ranks``, in that order. Only they call it."""
    order: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
    group: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True, **order)
    return group
