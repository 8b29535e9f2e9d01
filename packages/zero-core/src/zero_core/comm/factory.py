"""Transport collectives of an engine, and the memory that ranks of a node share."""

from __future__ import annotations

import logging

from zero_core.comm.control import ControlGroup
from zero_core.comm.device import DeviceCollectives
from zero_core.comm.host import HostCollectives
from zero_core.comm.meter import Links, Meter
from zero_core.comm.queues import queues_of
from zero_core.comm.shared_memory import SharedMemory
from zero_core.comm.topology import Ranks
from zero_core.protocols import TransportCollectives

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
