"""Discovery of the number of ranks per node.

Ranks of one node have equal **node keys**, and different nodes have different keys. Each rank
computes its key from the launcher's environment or the host name, and an all-gather collects all
keys. Two-hop collectives need equally sized groups of consecutive ranks that share a node.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import socket
from collections.abc import Mapping, Sequence
from itertools import groupby
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zero_comm.transport.torch_collectives import TorchCollectives

_log = logging.getLogger(__name__)

# Result per process group, because discovery costs a collective and the result never changes.
_FOUND: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def node_key(env: Mapping[str, str], rank: int) -> str:
    """Return the key of this process's node, from the launcher's variables or the host's name.

    torchrun sets ``GROUP_RANK``. With only ``LOCAL_WORLD_SIZE``, a node has that many consecutive
    ranks. SLURM sets ``SLURM_NODEID``. Otherwise, as with Open MPI, the host name is the key.
    """
    if "LOCAL_WORLD_SIZE" in env:
        if "GROUP_RANK" in env:
            return f"torchrun {env['GROUP_RANK']}"
        return f"torchrun {rank // int(env['LOCAL_WORLD_SIZE'])}"
    if "SLURM_NODEID" in env:
        return f"slurm {env['SLURM_NODEID']}"
    return f"host {socket.gethostname()}"


def ranks_per_node_of(keys: Sequence[object]) -> int:
    """Return the greatest common divisor of the nodes' sizes, given the node key of each rank.

    Return 1 if the ranks of a node are not consecutive.
    """
    runs = [(key, len(list(run))) for key, run in groupby(keys)]
    if len({key for key, _ in runs}) < len(runs):
        _log.warning("the ranks of a node are not consecutive; every rank counts as a node")
        return 1
    sizes = [size for _, size in runs]
    common = math.gcd(*sizes)
    if len(set(sizes)) > 1:
        _log.warning("nodes have %s ranks; groups of %d are used within each", sizes, common)
    return common


def check_ranks_per_node(
    collectives: TorchCollectives, given: int | DeviceMesh | None
) -> int | None:
    """Return ``given`` as a number or None. Raises ValueError if it does not fit the group."""
    if given is None:
        return None
    if isinstance(given, int):
        if given < 1 or collectives.world_size % given:
            raise ValueError(
                f"ranks_per_node must be a positive divisor of the group's "
                f"{collectives.world_size} ranks, got {given}"
            )
        return given
    group = collectives.group
    ranks = [0] if group is None else dist.get_process_group_ranks(group)
    if given.ndim != 2 or given.mesh.flatten().tolist() != ranks:
        raise ValueError(
            f"a DeviceMesh for ranks_per_node must have 2 dimensions, nodes and the ranks of each, "
            f"and hold the group's ranks {ranks} in this order, got {given.mesh.tolist()}"
        )
    return int(given.size(-1))


def find_ranks_per_node(
    collectives: TorchCollectives, given: int | None, device: torch.device
) -> int:
    """Return ``given``, or the number of consecutive ranks per node (1 without a process group).

    If ``given`` is None, a group's first call is an all-gather on ``device`` by all its ranks.
    """
    group = collectives.group
    if given is not None or group is None:
        return given or 1
    if group not in _FOUND:
        key = node_key(os.environ, dist.get_rank())
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        own = torch.tensor([int.from_bytes(digest, "little", signed=True)], device=device)
        keys = own.new_empty(collectives.world_size)
        collectives.all_gather(keys, own, unit=-1, version=-1, backward=False).wait()
        _FOUND[group] = ranks_per_node_of(keys.tolist())
    return _FOUND[group]
