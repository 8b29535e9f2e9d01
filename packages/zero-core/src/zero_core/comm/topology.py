"""Placement of ranks: the group that trains, its device, and the ranks of a node.

[Note: who says how many]
``build(mesh=...)`` of two dimensions does: the last one is within the node. Otherwise each rank
tells its node, by the first of these that its launcher has set: torchrun's ``LOCAL_WORLD_SIZE``
(with ``GROUP_RANK``, the node's number), SLURM's ``SLURM_NODEID``; else its host's name, as under
Open MPI, which numbers no nodes and may deal ranks out in turn. The host's name also decides if the
ranks do not agree on whom to ask. Two nodes of a launcher may well be one machine: they are treated
as two.

Nodes have equally many, consecutive ranks here. Where they are of different size, the greatest
common divisor of the sizes is taken, so that several groups lie in a node; where a node's ranks are
not consecutive, every rank counts as a node.

[Note: a rank's device]
A rank computes on the device bound to its process group (``init_process_group(device_id=...)``); if
there is none, on the current one if that is not the first, which a program that chose none has; and
otherwise on the one with the number ``LOCAL_RANK``, if there are so many. ``CUDA_VISIBLE_DEVICES``
may leave it one alone. ``build`` compares the devices of all ranks (`check_devices`).
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import groupby
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zero_core._torch import set_timeout, timeout_of
from zero_core.comm.control import ControlGroup, Exchange
from zero_core.comm.device_library import ControlLibrary, DeviceLibrary
from zero_core.comm.groups import (
    GroupBeats,
    ProcessLibrary,
    StoreExchange,
    backend_on,
    exchange_by_store,
    group_of_mesh,
)
from zero_core.comm.host import HostLibrary
from zero_core.comm.p2p import Messages, ProcessMessages
from zero_core.errors import ConfigError
from zero_core.watch.beats import ThreadedBoard
from zero_core.watch.place import Place
from zero_core.watch.watch import DeviceWaits, Watch, start

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ranks:
    """The data-parallel ranks, seen from one of them.

    Attributes:
        group: None means the default group, or none at all if ``size`` is 1.
        rank: this rank within the group.
        size: number of ranks.
        device: where this rank computes.
        per_node: ranks of a node, as given by a mesh; None: found from the launcher.
        timeout_s: longest wait for another rank; None: the group's timeout.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    device: torch.device
    per_node: int | None = None
    timeout_s: float | None = None

    @property
    def has_own_device(self) -> bool:
        """Whether each rank needs a device of its own. gloo and MPI serve several on one."""
        if self.size == 1 or self.device.type == "cpu" or not dist.is_initialized():
            return False
        return backend_on(self.group, self.device) not in ("gloo", "mpi")

    def limited(self, timeout_s: float | None) -> Self:
        """Return them with ``timeout_s`` as the longest wait for another rank.

        Where waiting does not block the host the timeout of the group itself is set, after which
        the library ends the process.
        """
        if timeout_s is None:
            return self
        if self.has_own_device:
            set_timeout(self.group, timeout_s)
        return replace(self, timeout_s=None if self.has_own_device else timeout_s)

    def connect(self, named_within_s: float | None = None) -> ControlGroup:
        """Return the control group of these ranks.

        It is watched unless ``named_within_s`` is None: an error names the rank that is its cause,
        and so does a log line if a wait lasts as long. 0: errors alone.
        """
        place, watch = Place(), None
        has_group = dist.is_available() and dist.is_initialized()
        if self.size > 1 and named_within_s is not None and has_group:
            watch = Watch(
                ThreadedBoard(GroupBeats(self.group, rank=self.rank, world_size=self.size)),
                place,
                rank=self.rank,
                world_size=self.size,
                within_s=min(named_within_s, self.timeout_s or named_within_s),
                device_waits=DeviceWaits(self.device) if self.has_own_device else None,
            )
            if named_within_s:
                start(watch)
        library: ControlLibrary
        if self.device.type == "cpu":
            library = HostLibrary(self.messages(), rank=self.rank, world_size=self.size)
        else:
            library = self.library()
        return ControlGroup(library, self.device, place, watch)

    def exchange_beside(self, watch: Watch | None) -> Exchange:
        """Return an exchange for a thread beside training. Every rank makes them in one order.

        ``watch`` is the one of these ranks' control group.
        """
        timeout = timeout_of(self.group, self.device) if self.size > 1 else timedelta()
        return StoreExchange(
            self.group, rank=self.rank, world_size=self.size, timeout=timeout, watch=watch
        )

    def messages(self) -> Messages:
        return ProcessMessages(self.group, self.timeout_s)

    def library(self) -> DeviceLibrary:
        return ProcessLibrary(
            self.group,
            rank=self.rank,
            world_size=self.size,
            device=self.device,
            timeout_s=self.timeout_s,
        )


def find_ranks(group: dist.ProcessGroup | Ranks | None, mesh: DeviceMesh | None) -> Ranks:
    """Find the ranks of ``group`` or ``mesh``, or all. Every rank of them must call it.

    The rank's accelerator becomes the current one. See [Note: a rank's device].

    Raises:
        ConfigError: both are given; the mesh does not serve; torch.distributed is not initialised
            where several ranks were started.
    """
    if mesh is not None and group is not None:
        raise ConfigError("build() takes process_group or mesh, found both: pass the mesh")
    if isinstance(group, Ranks):
        return group
    if dist.is_available() and dist.is_initialized():
        if mesh is not None and mesh.ndim == 1:
            group = mesh.get_group()
        device = _find_device(group)
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
    return Ranks(None, 0, 1, accelerator())


def accelerator() -> torch.device:
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, torch.accelerator.current_device_index())


def _find_device(group: dist.ProcessGroup | None) -> torch.device:
    """Choose this rank's device and make it the current one. See [Note: a rank's device]."""
    device = accelerator()
    if device.type == "cpu":
        return device
    if dist.get_backend(group) == "gloo" or backend_on(group, device) is None:
        return torch.device("cpu")
    known = dist.group.WORLD if group is None else group
    assert known is not None
    bound = known.bound_device_id
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if bound is not None:
        device = torch.device(bound.type, bound.index)
    elif device.index == 0 and local_rank < torch.accelerator.device_count():
        device = torch.device(device.type, local_rank)
    torch.accelerator.set_device_index(device)
    return device


def check_devices(ranks: Ranks) -> None:
    """Refuse ranks that share a device if each needs its own. Every rank must call it.

    They exchange their devices through the store of their group: NCCL refuses the first collective
    of ranks that share one, with an error that names none of them.
    """
    if not ranks.has_own_device:
        return
    identity = str(ranks.device)
    if ranks.device.type == "cuda":  # independent of its index
        identity = str(torch.cuda.get_device_properties(ranks.device).uuid)
    card = [socket.gethostname(), identity, str(ranks.device)]
    rows = exchange_by_store(
        ranks.group, json.dumps(card).encode(), rank=ranks.rank, world_size=ranks.size
    )
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
            "ranks by torchrun, which sets LOCAL_RANK, or call torch.accelerator.set_device_index("
            "local_rank) or init_process_group(device_id=...) before zero_core.build(); start no "
            "more ranks on a host than it has devices"
        )


def count_per_node(control: ControlGroup, ranks: Ranks) -> int:
    """Ranks of a node. Every rank must call it. See [Note: who says how many]."""
    if ranks.size == 1:
        return 1
    found, host = os.environ, socket.gethostname()
    launcher, node = "host", host
    if "LOCAL_WORLD_SIZE" in found:
        number = int(found.get("RANK", dist.get_rank())) // int(found["LOCAL_WORLD_SIZE"])
        launcher, node = "torchrun", found.get("GROUP_RANK", str(number))
    elif "SLURM_NODEID" in found:
        launcher, node = "SLURM", found["SLURM_NODEID"]
    card = json.dumps([ranks.per_node, launcher, node, host])
    cards = [json.loads(row) for row in control.gather_bytes(card.encode())]
    told = {card[0] for card in cards}
    if len(told) > 1:
        raise ConfigError(f"build(mesh=...): ranks of a node differ between ranks, found {told}")
    if ranks.per_node is not None:
        return ranks.per_node
    has_one_source = len({card[1] for card in cards}) == 1
    nodes = [f"{card[2] if has_one_source else card[3]}" for card in cards]
    return fold(nodes, is_told=ranks.rank == 0)


def fold(nodes: Sequence[str], *, is_told: bool = False) -> int:
    """Count the consecutive ranks that share a node, given each rank's node.

    ``is_told``: log what had to be given up.
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
