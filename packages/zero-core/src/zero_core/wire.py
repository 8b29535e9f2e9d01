"""How a host trades bytes with single peers: point to point, or by telling where they lie.

[Note: near and far]
A **far** peer gets the bytes themselves, point to point over torch.distributed. A **near** peer,
one that shares memory (`zero_core.shared_memory`), gets a **token**: where the bytes lie. It reads
them there when it waits, so a gather costs one copy and a reduction none. What lies in ordinary
memory (a plug-in's buffers) travels as to a far peer; all ranks use the same kind in the same call.

Near bytes must not change while a peer may still read them. Reductions and all-to-alls therefore
end with an **acknowledgement**. Gathers have none: shards change only after an exchange in which
every rank takes part once it has waited for its gathers (the sum of the gradient's facts, in a
step; see zero_core.protocols).

[Note: channels and threads]
A message is found by its sender and its tag: the channel (one per subgroup, and other ones for
every engine over a process group), the unit and the kind of exchange. So engines, subgroups, units
and lanes may interleave as they like, as long as the messages of one tag are sent and asked for in
the same order. gloo's pairs lock themselves, so any thread may send and receive; the caches below
are dictionaries whose entries, once made, do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import partial
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

from zero_core.errors import CollectiveError
from zero_core.protocols import Work
from zero_core.shared_memory import Place, SharedMemory

__all__ = ["Kind", "Wire", "arrived"]

_NUM_CHANNELS = 4096

_numbers: dict[str, Iterator[int]] = {}
"""Of the channels of each process group, so that two engines over one group do not share any."""


class Kind(IntEnum):
    """What a message is for; messages of different kinds never share a tag."""

    GATHER = 0
    SPREAD = 1
    """Handed on within the node."""
    REDUCE = 2
    REDUCE_READ = 3
    """The acknowledgement of a reduction."""
    SWAP = 4
    SWAP_READ = 5


class Wire:
    """This rank's connections with the members of a group.

    Attributes:
        rank: this rank within the group.
        members: the group's ranks, as ``group`` of torch.distributed numbers them.
        peers: the other ranks, from this one's right neighbour on, so that no rank is everybody's
            first target.
        near: those of the peers that share memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        members: Sequence[int],
        *,
        rank: int,
        shared: SharedMemory | None,
    ) -> None:
        """Every rank makes the wires of a process group in one order."""
        self.rank = rank
        self.members = list(members)
        size = len(self.members)
        self.peers = [(rank + k) % size for k in range(1, size)]
        near = frozenset[int]() if shared is None else shared.peers
        self.near = frozenset(peer for peer in self.peers if self.members[peer] in near)
        self.has_far = len(self.near) < len(self.peers)
        self._group = group
        self._shared = shared
        self._channel = _next_channel(group)
        self._tokens: dict[tuple[int, int, int, int], Tensor] = {}
        self._nod = torch.zeros(1, dtype=torch.uint8)

    def among(self, ranks: Sequence[int]) -> Wire:
        """The wire of a subgroup that this rank is in."""
        rank = list(ranks).index(self.rank)
        members = [self.members[r] for r in ranks]
        return Wire(self._group, members, rank=rank, shared=self._shared)

    def locate(self, tensor: Tensor) -> Place | None:
        """Where near peers find ``tensor``, if they do."""
        return None if self._shared is None else self._shared.locate(tensor)

    def trade(
        self, given: Tensor, place: Place | None, into: Tensor, peer: int, kind: Kind, unit: int
    ) -> Callable[[], Tensor]:
        """Give and take with one peer; what returns the other's bytes once they are there.

        ``given`` and ``into`` have the same number of elements and dtype. Far bytes arrive in
        ``into``; near ones stay where they are.
        """
        if place is None or peer not in self.near:
            works = self.swap(given, into, peer, kind, unit)
            return partial(arrived, works, into)
        key = (peer, *place, given.nbytes)
        mine = self._tokens.get(key)
        if mine is None:
            assert self._shared is not None
            self._shared.tell(self.members[peer], place)
            mine = self._tokens[key] = torch.tensor(key[1:])
        theirs = torch.empty(3, dtype=torch.int64)
        works = self.swap(mine, theirs, peer, kind, unit)
        return partial(self._look, works, theirs, peer, into.numel(), into.dtype)

    def swap(self, given: Tensor, into: Tensor, peer: int, kind: Kind, unit: int) -> list[Work]:
        """Start to send ``given`` to a peer and to receive as much from it."""
        tag = self._tag(kind, unit)
        return [self._receive(into, peer, tag), self._send(given, peer, tag)]

    def acknowledge(self, kind: Kind, unit: int) -> Callable[[], None]:
        """Tell the near peers that their bytes were read; what waits until they say the same."""
        tag = self._tag(kind, unit)
        near = [peer for peer in self.peers if peer in self.near]
        nods = torch.empty(len(near), dtype=torch.uint8)
        works = [self._receive(nods[i : i + 1], peer, tag) for i, peer in enumerate(near)]
        works += [self._send(self._nod, peer, tag) for peer in near]

        def wait() -> None:
            arrived(works, nods)

        return wait

    def _tag(self, kind: Kind, unit: int) -> int:
        # Ranks that gather different units must not take one for the other.
        return (unit * len(Kind) + kind) * _NUM_CHANNELS + self._channel

    def _look(
        self, works: Sequence[Work], token: Tensor, peer: int, numel: int, dtype: torch.dtype
    ) -> Tensor:
        assert self._shared is not None
        number, offset, nbytes = arrived(works, token).tolist()
        member, own = self.members[peer], self.members[self.rank]
        if nbytes != numel * dtype.itemsize:
            raise CollectiveError(
                f"rank {own} expects {numel * dtype.itemsize} bytes of rank {member}, which "
                f"has {nbytes}: the ranks exchange different dtypes or units"
            )
        return self._shared.at(member, (number, offset), numel, dtype)

    def _send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        work = dist.isend(tensor, group=self._group, group_dst=self.members[peer], tag=tag)
        assert work is not None
        return work

    def _receive(self, tensor: Tensor, peer: int, tag: int) -> Work:
        work = dist.irecv(tensor, group=self._group, group_src=self.members[peer], tag=tag)
        assert work is not None
        return work


def _next_channel(group: dist.ProcessGroup | None) -> int:
    """The next channel of a process group; one comes again after 4096 others."""
    name = ""
    if dist.is_available() and dist.is_initialized():
        known = dist.group.WORLD if group is None else group
        assert known is not None
        name = known.group_name
    return next(_numbers.setdefault(name, count())) % _NUM_CHANNELS


def arrived(works: Sequence[Work], tensor: Tensor) -> Tensor:
    """``tensor``, once ``works`` are done."""
    for work in works:
        work.wait()
    return tensor
