"""Collectives among accelerators, by their library (NCCL, say), and the choice of a transport.

All-gather and all-to-all are the library's; a reduction is an all-to-all and a local sum.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zero_core.comm.control import ControlGroup, all_gather_single, sum_in_rank_order
from zero_core.comm.host import HostCollectives, Transport
from zero_core.comm.meter import GRADIENTS, PARAMETERS, Links, Meter
from zero_core.comm.p2p import ProcessMessages
from zero_core.comm.queues import CommQueues, queues_of
from zero_core.comm.shared_memory import SharedMemory
from zero_core.comm.topology import Ranks
from zero_core.protocols import EXACT_GRADIENTS, TransportCollectives, Work

_log = logging.getLogger(__name__)


def share_memory(control: ControlGroup, ranks: Ranks, per_node: int) -> SharedMemory | None:
    """Memory that the ranks of this node read from each other, if they are hosts and can."""
    if ranks.device.type != "cpu" or ranks.size == 1:
        return None
    shared = SharedMemory(control, ranks_per_node=per_node)
    num_far = per_node - 1 - len(shared.peers)
    if num_far:
        _log.info(
            "rank %d: %d of the %d other ranks of its node cannot share memory with it (another "
            "host, user or namespace of processes): what they exchange travels through "
            "torch.distributed",
            ranks.rank,
            num_far,
            per_node - 1,
        )
    return shared if shared.peers else None


def make_transport(
    ranks: Ranks, per_node: int, shared: SharedMemory | None, meter: Meter
) -> TransportCollectives:
    """The engine's own collectives. Every rank must call it."""
    queues = queues_of(ranks.device)
    if ranks.size == 1 or ranks.device.type == "cpu":
        return HostCollectives(
            ranks.messages(),
            rank=ranks.rank,
            world_size=ranks.size,
            shared=shared,
            ranks_per_node=per_node,
            queues=queues,
            meter=meter,
        )
    links = Links(ranks.size, per_node, is_ring=True)
    return DeviceCollectives(ranks.group, rank=ranks.rank, links=links, queues=queues, meter=meter)


class DeviceCollectives(Transport):
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
        """Every rank of ``group`` (None: the default group) must call it.

        ``rank`` is this rank within the group, ``meter`` counts what is sent.
        """
        super().__init__(rank, links, queues, meter)
        self._group = group
        self._members = dist.get_process_group_ranks(group)
        # Where a block's parameter is unused on one rank only, reductions and gathers interleave
        # differently there: each queue has a group of its own.
        self._reduce_group = _new_group(self._members)

    def subgroup(self, ranks: Sequence[int]) -> TransportCollectives:
        self._check_subgroup(ranks)
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
        self._check_all_to_all(out, parts)
        sent = self._links.direct(parts.nbytes // self.world_size)
        self._meter.add("all_to_all", GRADIENTS, sent)
        return self._swap(out, parts)

    def _swap(self, out: Tensor, parts: Tensor) -> Work:
        work: Any = dist.all_to_all_single(out, parts, group=self._reduce_group, async_op=True)
        return cast(Work, work)


@dataclass(eq=False)
class _DeviceReduction:
    """An all-to-all under way, and the sum that follows it: `zero_core.protocols.Reduction`."""

    work: Work | None
    out: Tensor
    received: Tensor
    contributions: Sequence[Tensor]
    free: list[Tensor]

    def wait(self) -> None:
        """Sum in rank order. Once."""
        if self.work is not None:
            work, self.work = self.work, None
            work.wait()
            sum_in_rank_order(self.out, self.contributions)
            self.free.append(self.received)


def _new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A group of global ``ranks``, in that order. Only they call it."""
    order: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
    group: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True, **order)
    return group
