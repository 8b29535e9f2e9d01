"""Host collectives over gloo ranks, with shared memory within a node."""

from __future__ import annotations

import torch

from zero_core.comm.control import ControlGroup
from zero_core.comm.groups import ProcessLibrary, Ranks
from zero_core.comm.host import HostCollectives
from zero_core.comm.meter import Links, Meter
from zero_core.comm.p2p import ProcessMessages
from zero_core.comm.queues import HostQueues
from zero_core.comm.shared_memory import SharedMemory

CPU = torch.device("cpu")


def control_of(rank: int, world_size: int) -> ControlGroup:
    return ControlGroup(ProcessLibrary(Ranks(None, rank, world_size, CPU)), CPU)


def connect(
    rank: int, world_size: int, per_node: int | None = None
) -> tuple[HostCollectives, SharedMemory]:
    """Connect this rank. Each node of ``per_node`` ranks (None: all ranks) shares memory."""
    per_node = per_node or world_size
    shared = SharedMemory(control_of(rank, world_size), timeout_s=300, ranks_per_node=per_node)
    node = rank // per_node * per_node
    assert shared.peers == set(range(node, node + per_node)) - {rank}
    meter = Meter(Links(world_size, per_node, is_ring=False))
    return HostCollectives(ProcessMessages(None), rank, shared, HostQueues(), meter), shared
