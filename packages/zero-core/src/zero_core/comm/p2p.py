"""Point-to-point messages, matched by sender and tag.

[Note: channels and threads]
A tag combines a channel, the kind of exchange and a number (a unit, or the size of a control
message). Each subgroup of each engine over a process group has a different channel, until the 4,095
channels repeat. Engines, subgroups, units and queues may therefore interleave freely if sender and
receiver start the messages of one tag in the same order. Any thread may send and receive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum
from itertools import count
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from zero_core.comm.queues import Pending
from zero_core.protocols import Work

_NUM_CHANNELS = 4096
CONTROL_CHANNEL = 0
"""Channel of a process group's control messages. Channels from `Messages.next_channel`
would differ between ranks after an engine's ``build`` has failed on only some of them."""

_numbers: defaultdict[str, count[int]] = defaultdict(count)
"""Counter of `ProcessMessages.next_channel`, by the process group's name."""
_under_way: WeakKeyDictionary[dist.ProcessGroup, set[dist.Work]] = WeakKeyDictionary()
"""Messages of each process group whose ``wait`` has not returned."""


class Kind(IntEnum):
    """Purpose of a message. Messages of different kinds never share a tag."""

    GATHER = 0
    SPREAD = 1  # a shard from another node, forwarded within this node
    REDUCE = 2
    REDUCE_READ = 3  # acknowledgement: a reduction has read the peer's slice
    SWAP = 4
    SWAP_READ = 5
    REDUCE_REST = 6  # the part of an encoded slice that exceeds the expected length
    CONTROL_GATHER = 7  # this and the following kinds belong to `zero_core.comm.host.HostLibrary`
    CONTROL_SUM = 8
    CONTROL_BROADCAST = 9
    CONTROL_EXCHANGE = 10


def tag_of(channel: int, kind: Kind, number: int) -> int:
    """Return the tag of a message. ``number`` must be below 2**15."""
    return (number * len(Kind) + kind) * _NUM_CHANNELS + channel


class Messages(Protocol):
    """Point-to-point messages among the ranks of a group."""

    def isend(self, tensor: Tensor, target: int, tag: int) -> Work:
        """Start to send a CPU tensor, which must not change until ``wait`` returns."""

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        """Start to receive from ``source`` into a CPU tensor of the size of the sent tensor."""

    def next_channel(self) -> int:
        """Return the next channel number. All ranks must call it equally often."""


class ProcessMessages:
    """`Messages` between processes, over torch.distributed."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float | None = None) -> None:
        """Use ``group`` or all ranks. ``timeout_s`` limits each wait. None: the group's timeout."""
        if not dist.is_available() or not dist.is_initialized():
            group = None
        elif group is None:
            group = dist.group.WORLD
        self._group = group
        # Arguments of ``wait``: a timeout or nothing.
        self._limits = [] if timeout_s is None else [timedelta(seconds=timeout_s)]
        self._under_way = set[Any]() if group is None else _under_way.setdefault(group, set())

    # The checks in `dist.isend` and `dist.irecv` would take as long as sending a small message.

    def isend(self, tensor: Tensor, target: int, tag: int) -> Work:
        assert self._group is not None, "a single rank sends nothing"
        return self._keep(self._group.send([_real(tensor)], target, tag))

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        assert self._group is not None, "a single rank receives nothing"
        return self._keep(self._group.recv([_real(tensor)], source, tag))

    def _keep(self, message: dist.Work) -> Work:
        # gloo sends in order on each connection. A send or receive that is freed before it
        # completes blocks all later messages of that connection, whatever their tag.
        self._under_way.add(message)

        def wait() -> None:
            message.wait(*self._limits)
            self._under_way.discard(message)

        return Pending(wait)

    def next_channel(self) -> int:
        name = "" if self._group is None else self._group.group_name
        return CONTROL_CHANNEL + 1 + next(_numbers[name]) % (_NUM_CHANNELS - 1)


def _real(tensor: Tensor) -> Tensor:
    """View a complex tensor as real, because gloo cannot send complex dtypes."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def wait_all(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()
