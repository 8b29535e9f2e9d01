"""Point-to-point exchange between hosts: bytes for far peers, addresses for near ones.

[Note: near and far]
A **far** peer gets the bytes themselves, point to point over torch.distributed. A **near** peer
shares memory (`zero_core.comm.shared_memory`) and gets a **token**: the offset and number of the
bytes, which it reads in place when it waits. So a gather costs one copy and a reduction none.
Ordinary memory (a plug-in's buffers) is sent as to a far peer; all ranks use the same kind in the
same call.

Near bytes must not change while a peer may still read them. Reductions and all-to-alls therefore
end with an **acknowledgement**. Gathers have none: shards change only after an exchange in which
every rank takes part once it has waited for its gathers (in a step: the sum of the gradient's
statistics; see `zero_core.protocols.Collectives`).

[Note: channels and threads]
A message is found by its sender and its tag: the channel (one per subgroup, and other ones for
every engine over a process group), the unit and the kind of exchange. So engines, subgroups, units
and queues may interleave in any way, as long as the messages of one tag are sent and received in
the same order. Any thread may send and receive: gloo's pairs and the mailbox lock themselves.

[Note: coded slices]
With a codec (`zero_core.protocols.SliceCodec`) a rank of another node gets a message of its slice.
It is decoded to the place where the slice itself would have arrived, so the sum, its order and each
rank's part are the same. Coding is a job of the queue of reductions: it takes a pass over the
slices, while backward goes on.

A message's length is not known before. Both ranks know how long the last one of the unit was, and
expect a little more. So many bytes are sent, with the true length in front, and their receiver asks
for them before they are made. What is longer is sent as a second part. A length that travels first
would wait behind other data in the queue of the link, as would the request that follows it: 18 ms
per unit at 200 Mbit/s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from itertools import count
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from zero_core.comm.queues import Pending
from zero_core.comm.shared_memory import Letter, SharedMemory
from zero_core.errors import CollectiveError
from zero_core.protocols import SliceCodec, Work

_ALIGNMENT = 64
"""Bytes at whose multiples messages of coded slices begin, and of the length in front of each."""
_SLACK = 128
"""A message is expected to be at most longer than the last one by one part in so many."""
_NUM_CHANNELS = 4096
CONTROL_CHANNEL = 0
"""Channel of the control groups of a process group. A rank may have made more of them than others,
where a build failed on it. Like its collectives, their exchanges are in one order on all ranks."""

_numbers: defaultdict[str, count[int]] = defaultdict(count)
"""Channel numbers of each process group, so that two engines over one group share none."""
_under_way: WeakKeyDictionary[dist.ProcessGroup, set[_Message]] = WeakKeyDictionary()
"""Messages of each process group that nobody has waited for."""


class Kind(IntEnum):
    """Purpose of a message. Messages of different kinds never share a tag."""

    GATHER = 0
    SPREAD = 1  # a shard of another node, passed on within the node
    REDUCE = 2
    REDUCE_READ = 3  # the acknowledgement of a reduction
    SWAP = 4
    SWAP_READ = 5
    REDUCE_REST = 6  # the second part of a coded slice, which was longer than expected
    CONTROL_GATHER = 7  # this and the next ones: of `zero_core.comm.host.HostLibrary`
    CONTROL_SUM = 8
    CONTROL_BROADCAST = 9
    CONTROL_EXCHANGE = 10


def tag_of(channel: int, kind: Kind, number: int) -> int:
    """Return the tag of messages of a kind with ``number``, which is below 2**15."""
    return (number * len(Kind) + kind) * _NUM_CHANNELS + channel


class Messages(Protocol):
    """Messages between single ranks of a group, found by their sender and tag."""

    def isend(self, tensor: Tensor, target: int, tag: int) -> Work:
        """Start to send a CPU tensor, which must not change until the work is done."""

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        """Start to receive into a CPU tensor of the size that ``source`` sends."""

    def next_channel(self) -> int:
        """Return a number that no other user of the group has. Every rank must call it."""


class _Message:
    """A message under way, kept alive until it has been waited for.

    gloo keeps what is sent over a connection in order. A send or receive that is freed before it
    is done stays at the head of that order for good, and no later message of any tag arrives.
    """

    __slots__ = ("_limits", "_under_way", "_work")

    def __init__(
        self, work: dist.Work, limits: Sequence[timedelta], under_way: set[_Message]
    ) -> None:
        self._work = work
        self._limits = limits  # of the wait: one or none
        self._under_way = under_way
        under_way.add(self)

    def wait(self) -> None:
        self._work.wait(*self._limits)
        self._under_way.discard(self)


class ProcessMessages:
    """`Messages` between processes, by torch.distributed."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float | None = None) -> None:
        """``group`` None is the default group, or none at all for a single rank.

        Waits fail after ``timeout_s`` seconds. None: the timeout that the group began with.
        """
        if not dist.is_available() or not dist.is_initialized():
            group = None
        elif group is None:
            group = dist.group.WORLD
        self._group = group
        self._limits = [] if timeout_s is None else [timedelta(seconds=timeout_s)]
        self._under_way = set[_Message]() if group is None else _under_way.setdefault(group, set())

    # Not by `dist.isend` and `dist.irecv`, whose checks of each call take as long as the message.

    def isend(self, tensor: Tensor, target: int, tag: int) -> Work:
        assert self._group is not None, "a single rank sends nothing"
        work = self._group.send([_real(tensor)], target, tag)
        return _Message(work, self._limits, self._under_way)

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Work:
        assert self._group is not None, "a single rank receives nothing"
        work = self._group.recv([_real(tensor)], source, tag)
        return _Message(work, self._limits, self._under_way)

    def next_channel(self) -> int:
        name = "" if self._group is None else self._group.group_name
        return CONTROL_CHANNEL + 1 + next(_numbers[name]) % (_NUM_CHANNELS - 1)


def _real(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor in a dtype that gloo sends."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@dataclass(slots=True, eq=False)
class Parcel:
    """One peer's bytes on their way."""

    wire: PeerToPeer
    works: Sequence[Work]
    into: Tensor
    peer: int
    token: Letter | None = None

    def receive(self) -> Tensor:
        """Wait, and return the peer's bytes: far ones in ``into``, near ones in place."""
        if self.token is None:
            wait_all(self.works)
            return self.into
        wire, peer, into = self.wire, self.peer, self.into
        assert wire.shared is not None, "it has near peers"
        offset, nbytes = wire.shared.mailbox.wait(self.token)
        if nbytes != into.nbytes:
            raise CollectiveError(
                f"rank {wire.members[wire.rank]} expects {into.nbytes} bytes of rank "
                f"{wire.members[peer]}, which has {nbytes}: the ranks exchange different dtypes or "
                "units"
            )
        return wire.shared.at(wire.members[peer], offset, into.numel(), into.dtype)

    def wait(self) -> None:
        """Wait, and copy the peer's bytes to ``into`` if they are not there. Once."""
        found = self.receive()
        if found.data_ptr() != self.into.data_ptr():
            self.into.copy_(found)


class PeerToPeer:
    """Connections of this rank with the ``members`` of a group, by their numbers in ``messages``.

    ``rank`` and the peers are numbered within the group.
    """

    def __init__(
        self, messages: Messages, members: Sequence[int], rank: int, shared: SharedMemory | None
    ) -> None:
        """Every rank makes the connections of a process group in one order."""
        self.rank = rank
        self.members = list(members)
        size = len(self.members)
        # From the right neighbour on, so that no rank is everybody's first target.
        self.peers = [(rank + k) % size for k in range(1, size)]
        near = frozenset[int]() if shared is None else shared.peers
        self.near = frozenset(peer for peer in self.peers if self.members[peer] in near)
        self.has_far = len(self.near) < len(self.peers)
        self._messages = messages
        self.shared = shared
        self._channel = messages.next_channel()

    def among(self, ranks: Sequence[int]) -> PeerToPeer:
        """Return the connections of a subgroup that this rank is in."""
        members = [self.members[r] for r in ranks]
        return PeerToPeer(self._messages, members, list(ranks).index(self.rank), self.shared)

    def locate(self, tensor: Tensor) -> int | None:
        """Return the offset at which near peers read ``tensor``. None if it is not shared."""
        return None if self.shared is None else self.shared.locate(tensor)

    def exchange(
        self, given: Tensor, offset: int | None, into: Tensor, peer: int, kind: Kind, unit: int
    ) -> Parcel:
        """Start to exchange as many elements with a peer. ``offset``: see `locate` of ``given``."""
        if offset is None or peer not in self.near:
            works = [self.receive(into, peer, kind, unit), self.send(given, peer, kind, unit)]
            return Parcel(self, works, into, peer)
        assert self.shared is not None, "it has near peers"
        member, tag = self.members[peer], tag_of(self._channel, kind, unit)
        theirs = self.shared.mailbox.expect(member, tag)
        self.shared.mailbox.post(member, tag, offset, given.nbytes)
        return Parcel(self, (), into, peer, theirs)

    def send(self, given: Tensor, peer: int, kind: Kind, unit: int) -> Work:
        return self._messages.isend(given, self.members[peer], tag_of(self._channel, kind, unit))

    def receive(self, into: Tensor, peer: int, kind: Kind, unit: int) -> Work:
        return self._messages.irecv(into, self.members[peer], tag_of(self._channel, kind, unit))

    def acknowledge(self, kind: Kind, unit: int) -> Work:
        """Report to the near peers that their bytes were read. Waiting waits for their reports."""
        tag = tag_of(self._channel, kind, unit)
        assert self.shared is not None, "it has near peers"
        mailbox, near = self.shared.mailbox, [self.members[peer] for peer in self.near]
        reports = [mailbox.expect(member, tag) for member in near]
        for member in near:
            mailbox.post(member, tag, 0, 0)
        return Pending(lambda: [mailbox.wait(report) for report in reports])


class ExchangeBuffers:
    """Buffers for what arrives in reductions, kept from one to the next. Any thread may ask."""

    def __init__(self) -> None:
        self.nbytes = 0  # of all of them
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer of ``numel`` elements, which nobody else has until it is released."""
        free = self._free.setdefault((numel, dtype), [])
        try:
            return free.pop()  # another thread may have taken the last one
        except IndexError:
            self.nbytes += numel * dtype.itemsize
            with torch.inference_mode(False):  # it serves training too
                return torch.empty(numel, dtype=dtype)

    def release(self, buffer: Tensor) -> None:
        self._free[buffer.numel(), buffer.dtype].append(buffer)


def coded_room(max_nbytes: int) -> int:
    """Return the bytes of the buffer for a message of at most ``max_nbytes``, each way."""
    return _ALIGNMENT + -(-max_nbytes // _ALIGNMENT) * _ALIGNMENT


class CodedSlices:
    """Exchanges coded slices with ranks of other nodes. See [Note: coded slices]."""

    def __init__(self, codec: SliceCodec, wire: PeerToPeer, buffers: ExchangeBuffers) -> None:
        self.codec = codec
        self._wire = wire
        self._buffers = buffers
        # Bytes that are expected of a unit's next message, by peer: to it, and from it.
        self._expected: dict[tuple[int, int], tuple[int, int]] = {}

    def start(
        self, slices: Tensor, parts: Tensor, peers: Sequence[int], unit: int
    ) -> Callable[[], int]:
        """Ask for the messages of ``peers``, whose slices are decoded to ``parts``.

        Returns the job that codes and sends the slices and decodes those of the peers. It returns
        the bytes sent.
        """
        wire, codec = self._wire, self.codec
        most = codec.max_nbytes(slices.dtype, slices.shape[1])
        room = coded_room(most)
        first = room * 3 // 4 // _ALIGNMENT * _ALIGNMENT
        buffers = [self._buffers.take(len(peers) * room, torch.uint8) for _ in range(2)]
        given, taken = (buffer.view(-1, room) for buffer in buffers)
        expected = [self._expected.get((unit, peer), (first, first)) for peer in peers]
        receives = [
            wire.receive(row[:of], peer, Kind.REDUCE, unit)
            for peer, row, (_, of) in zip(peers, taken, expected, strict=True)
        ]

        def finish() -> int:
            sends: list[Work] = []
            sent_nbytes: list[int] = []
            for peer, row, (to, _) in zip(peers, given, expected, strict=True):
                nbytes = codec.pack(slices[peer], row[_ALIGNMENT : _ALIGNMENT + most])
                row[:8].view(torch.int64)[0] = nbytes
                sends.append(wire.send(row[:to], peer, Kind.REDUCE, unit))
                rest = row[to : _ALIGNMENT + nbytes]
                if rest.numel():
                    sends.append(wire.send(rest, peer, Kind.REDUCE_REST, unit))
                sent_nbytes.append(nbytes)
            taken_nbytes: list[int] = []
            for peer, row, (_, of), work in zip(peers, taken, expected, receives, strict=True):
                work.wait()
                nbytes = int(row[:8].view(torch.int64))
                if not 0 <= nbytes <= most:
                    raise CollectiveError(
                        f"rank {wire.members[wire.rank]} expects at most {most} bytes of a coded "
                        f"gradient of rank {wire.members[peer]}, which announces {nbytes}: the "
                        "ranks reduce different units"
                    )
                rest = row[of : _ALIGNMENT + nbytes]
                if rest.numel():
                    wire.receive(rest, peer, Kind.REDUCE_REST, unit).wait()
                message = row[_ALIGNMENT : _ALIGNMENT + nbytes]
                codec.unpack(message, parts[peer], sender=wire.members[peer])
                taken_nbytes.append(nbytes)
            wait_all(sends)
            for peer, *lengths in zip(peers, sent_nbytes, taken_nbytes, strict=True):
                to, of = (min(room, coded_room(nbytes + nbytes // _SLACK)) for nbytes in lengths)
                self._expected[unit, peer] = to, of
            for buffer in buffers:
                self._buffers.release(buffer)
            firsts = [to for to, _ in expected]
            return sum(max(a, _ALIGNMENT + b) for a, b in zip(firsts, sent_nbytes, strict=True))

        return finish


def wait_all(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()
