"""Collectives among accelerators, by their library (NCCL, say), and the choice of a transport.

All-gather and all-to-all are the library's; a reduction is an all-to-all and a local sum.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_core.comm.control import ControlGroup, sum_in_rank_order
from zero_core.comm.device_library import DeviceLibrary, Lane
from zero_core.comm.host import HostCollectives, Transport
from zero_core.comm.meter import GRADIENTS, PARAMETERS, Links, Meter
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
    return DeviceCollectives(ranks.library(), links=links, queues=queues, meter=meter)


class DeviceCollectives(Transport):
    """`zero_core.protocols.TransportCollectives` of an accelerator. See there for the contract."""

    reduces_in_place = False

    def __init__(
        self,
        library: DeviceLibrary,
        *,
        links: Links,
        queues: CommQueues,
        meter: Meter | None = None,
        members: Sequence[int] | None = None,
    ) -> None:
        """Every rank of ``library`` must call it.

        ``members`` are the ranks of ``library`` that take part, this one among them; None: all.
        ``meter`` counts what is sent.
        """
        self._library = library
        self._members = list(range(library.world_size) if members is None else members)
        super().__init__(self._members.index(library.rank), links, queues, meter)
        # Where a block's parameter is unused on one rank only, reductions and gathers interleave
        # differently there: each queue has a communicator of its own.
        self._gathers = library.subgroup(self._members, Lane.GATHERS)
        self._reductions = library.subgroup(self._members, Lane.REDUCTIONS)

    def subgroup(self, ranks: Sequence[int]) -> TransportCollectives:
        self._check_subgroup(ranks)
        return DeviceCollectives(
            self._library,
            links=self._links.among(ranks),
            queues=self._queues,
            meter=self._meter,
            members=[self._members[r] for r in ranks],
        )

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> Work:
        content = GRADIENTS if version == EXACT_GRADIENTS else PARAMETERS
        self._meter.add("all_gather", content, self._links.gather(shard.nbytes))
        own = out.view(self.world_size, -1)[self.rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        return self._gathers.all_gather(out, shard)

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        sent = self._links.direct(full.nbytes // self.world_size)
        self._meter.add("reduce_scatter", GRADIENTS, sent)
        free = self._scratch.setdefault((full.numel(), full.dtype), [])
        received = free.pop() if free else torch.empty_like(full)
        parts = list(received.view(self.world_size, -1))
        work = self._reductions.all_to_all(received, full)
        return _DeviceReduction(work, out, received, parts, free)

    def all_to_all(self, out: Tensor, parts: Tensor, *, unit: int) -> Work:
        self._check_all_to_all(out, parts)
        sent = self._links.direct(parts.nbytes // self.world_size)
        self._meter.add("all_to_all", GRADIENTS, sent)
        return self._reductions.all_to_all(out, parts)


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
