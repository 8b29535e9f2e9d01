"""Placement of ranks: the group that trains, each rank's device, and the ranks per node.

[Note: ranks per node]
With ``build(mesh=...)`` of two dimensions, each row of the mesh is a node. Otherwise the launcher's
variables identify a rank's node: torchrun's ``LOCAL_WORLD_SIZE`` (with ``GROUP_RANK``, the node's
number), or else SLURM's ``SLURM_NODEID``. If none is set (Open MPI does not number nodes), or if
launchers differ between ranks, the host name identifies the node. Two torchrun or SLURM nodes on
one machine count as two. All nodes are treated as having equally many ranks: see `fold`.

[Note: a rank's device]
If the process group has a backend for accelerators other than gloo, a rank uses the device bound to
the group (``init_process_group(device_id=...)``). If none is bound, the rank uses the current
device, unless that is device 0, the default. In that case it uses the device of its local rank
(`LOCAL_RANKS`), or device 0 if there is none (each rank may see one device only).
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
from collections.abc import Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zero_core.comm.control import ControlGroup
from zero_core.comm.groups import Ranks, backend_on, exchange_once, group_of_mesh, known_group
from zero_core.errors import ConfigError

_log = logging.getLogger(__name__)
# Variables of torchrun, Open MPI, MPICH, Cray PALS and SLURM for a process's rank on its node. The
# first that is set counts. SLURM is last, because it may start the other launchers.
LOCAL_RANKS = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK",
    "SLURM_LOCALID",
)


def find_ranks(group: dist.ProcessGroup | Ranks | None, mesh: DeviceMesh | None) -> Ranks:
    """Return the ranks of ``group`` or ``mesh``, by default all. Each of these ranks must call it.

    In a process group with accelerators, makes this rank's accelerator the current device.
    """
    if mesh is not None and group is not None:
        raise ConfigError("build() takes process_group or mesh, found both: pass the mesh")
    if isinstance(group, Ranks):
        return group
    if dist.is_available() and dist.is_initialized():
        if mesh is not None and mesh.ndim == 1:
            group = mesh.get_group()
        device = _accelerator()
        if device.type != "cpu" and (
            dist.get_backend(group) == "gloo" or backend_on(group, device) is None
        ):
            device = torch.device("cpu")
        if device.type != "cpu":
            bound = known_group(group).bound_device_id
            local_rank = int(next(filter(None, map(os.environ.get, LOCAL_RANKS)), "0"))
            if bound is not None:
                device = torch.device(bound.type, bound.index)
            elif device.index == 0 and local_rank < torch.accelerator.device_count():
                device = torch.device(device.type, local_rank)
            torch.accelerator.set_device_index(device)
        per_node = None
        if mesh is not None and mesh.ndim != 1:
            members: list[int] = mesh.mesh.flatten().tolist()
            if mesh.ndim != 2 or members != sorted(members):
                raise ConfigError(
                    "build(mesh=...): expected one dimension (ranks) or two (nodes, ranks of a "
                    f"node) with ascending ranks, found {mesh}"
                )
            is_world = members == list(range(dist.get_world_size()))
            group = None if is_world else group_of_mesh(mesh, device)
            per_node = mesh.size(1)
        return Ranks(group, dist.get_rank(group), dist.get_world_size(group), device, per_node)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but torch.distributed is not initialised: "
            "call torch.distributed.init_process_group() before zero_core.build()"
        )
    return Ranks(None, 0, 1, _accelerator())


def _accelerator() -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return torch.device("cpu")
    return torch.device(found.type, torch.accelerator.current_device_index())


def check_devices(ranks: Ranks) -> None:
    """Raise ConfigError if ranks share an accelerator without gloo or MPI. Every rank calls it."""
    if not ranks.has_own_device:
        return
    identity = str(ranks.device)
    if ranks.device.type == "cuda":  # processes may number devices differently
        identity = str(torch.cuda.get_device_properties(ranks.device).uuid)
    card = [socket.gethostname(), identity, str(ranks.device)]
    # Use the store, because NCCL would fail in the first collective without naming the ranks.
    rows = exchange_once(ranks, "the ranks' devices", json.dumps(card).encode())
    cards = [json.loads(row) for row in rows]
    users: dict[tuple[str, str], list[int]] = {}
    for rank, (host, identity, _) in enumerate(cards):
        users.setdefault((host, identity), []).append(rank)
    shared = [
        f"ranks {found} on {cards[found[0]][2]} of {host}"
        for (host, _), found in users.items()
        if len(found) > 1
    ]
    if shared:
        raise ConfigError(
            f"build(): each rank needs a device of its own, found {'; '.join(shared)}. Start the "
            "ranks by torchrun, srun or mpirun, which number a node's ranks, or call "
            "torch.accelerator.set_device_index(local_rank) or init_process_group(device_id=...) "
            "before zero_core.build(); start no more ranks on a host than it has devices"
        )


def count_per_node(control: ControlGroup, ranks: Ranks) -> int:
    """Return the number of ranks per node: [Note: ranks per node]. Every rank must call it."""
    if ranks.size == 1:
        return 1
    found, host = os.environ, socket.gethostname()
    launcher, node = "host", host
    if "LOCAL_WORLD_SIZE" in found:
        number = int(found.get("RANK", dist.get_rank())) // int(found["LOCAL_WORLD_SIZE"])
        launcher, node = "torchrun", found.get("GROUP_RANK", str(number))
    elif "SLURM_NODEID" in found:
        launcher, node = "SLURM", found["SLURM_NODEID"]
    cards = control.gather_json([ranks.per_node, launcher, node, host])
    told = {card[0] for card in cards}
    if len(told) > 1:
        raise ConfigError(f"build(mesh=...): ranks of a node differ between ranks, found {told}")
    if ranks.per_node is not None:
        return ranks.per_node
    has_one_launcher = len({card[1] for card in cards}) == 1
    nodes = [card[2] if has_one_launcher else card[3] for card in cards]
    return fold(nodes, is_told=ranks.rank == 0)


def fold(nodes: Sequence[str], *, is_told: bool = False) -> int:
    """Return the greatest common divisor of the numbers of ranks of all nodes.

    ``nodes``: each rank's node. Returns 1 if a node's ranks are not consecutive. ``is_told``: log
    warnings.
    """
    sizes = [len(list(run)) for _, run in groupby(nodes)]
    if len(sizes) > len(set(nodes)):
        if is_told:
            _log.warning(
                "the ranks of a node are not consecutive (%s): every rank counts as a node of its "
                "own; number the ranks node by node",
                ", ".join(nodes),
            )
        return 1
    per_node = math.gcd(*sizes)
    if is_told and len(set(sizes)) > 1:
        _log.warning(
            "nodes have %s ranks: they count as nodes of %d, the greatest common divisor",
            ", ".join(map(str, sizes)),
            per_node,
        )
    return per_node
