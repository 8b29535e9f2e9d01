"""Collectives of CPU ranks, made of messages between pairs of ranks.

gloo's all-gather passes shards along a ring, and its reduce-scatter is an all-reduce. Direct
messages take less time.

[Note: near and far]
A **far** peer receives the bytes point to point over torch.distributed. A **near** peer shares
memory with this rank (`zero_core.comm.shared_memory`). It receives a message with the offset and
size of the bytes, and reads them in place when it waits. Between near peers, a gather thus costs
one copy and a reduction none. Tensors outside of shared memory (a plug-in's own buffers) are sent
to near peers as to far ones, so near peers must use the same kind of memory in the same call.

Bytes in shared memory must not change while a peer may still read them. Reductions and all-to-alls
therefore end with an **acknowledgement**. Gathers need none, because the caller changes a shard
only after all ranks have waited for its gather (`zero_core.protocols.Collectives`).

[Note: once per node]
With N > 1 nodes of R > 1 ranks, a rank sends its shard once to each other node, to the rank at the
same position. That rank forwards the shard within its node. A rank thus sends N - 1 shards to other
nodes instead of (N - 1) R. Forwarding must wait for the shard, so the gather is a job of the
gathers' queue. Reductions stay direct, because sums per node would change the rounding.

[Note: coded slices]
With a codec (`zero_core.protocols.SliceCodec`), ranks of other nodes receive encoded slices. A
slice is decoded into the buffer where the raw slice would have arrived, so the order of the sum is
the same. Encoding takes a pass over the slices. It runs as a job of the queue of reductions, in
parallel with backward.

The receiver does not know a message's length in advance. Both sides therefore compute an expected
length, slightly above that of the unit's last message. The receiver posts a receive of this length
early, and the sender fills it, starting with the true length. Excess bytes follow in a second
message. (A separate message with the length would queue behind other data.)

[Note: messages of different sizes never meet]
Ranks that take different branches of a program start different exchanges. gloo's collectives match
exchanges by order alone. If sizes differ, gloo ends the receiving process with ``std::terminate``.
`HostLibrary` matches messages by sender and by a tag that contains the kind of exchange and the
number of bytes (modulo `_NUM_SIZES`). Ranks whose tags differ therefore wait for each other
until the timeout raises an error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from zero_core.comm.fused_sum import add_in_rank_order, sum_in_rank_order
from zero_core.comm.meter import GRADIENTS, PARAMETERS, Meter
from zero_core.comm.p2p import CONTROL_CHANNEL, Kind, Messages, tag_of, wait_all
from zero_core.comm.queues import CommQueues, Pending
from zero_core.comm.shared_memory import Letter, SharedMemory
from zero_core.errors import CollectiveError
from zero_core.protocols import EXACT_GRADIENTS, Gathered, Reduced, SliceCodec, Work

_ALIGNMENT = 64
"""Alignment of encoded messages in bytes, and size of the length field in front of each."""
_SLACK = 128
"""A message's expected length exceeds that of the unit's last one by ``1 / _SLACK``, rounded up."""
_Rows = Sequence[Tensor]  # a buffer's slices, by rank
_NUM_SIZES = 32_749
"""Modulus of message sizes in tags: the largest prime below 2**15, as tags have 31 bits."""


class Transport:
    """Base class of the collectives of hosts and of accelerators."""

    def __init__(
        self, rank: int, queues: CommQueues, meter: Meter, members: Sequence[int] | None
    ) -> None:
        """Connect ``members``, which include ``rank``. None: all ranks."""
        self._meter = meter
        self._queues = queues
        self._links = meter.links if members is None else meter.links.among(members)
        self._members = range(self._links.world_size) if members is None else members
        self.rank = self._members.index(rank)
        self.world_size = len(self._members)
        self._codec: SliceCodec | None = None

    def coded(self, codec: SliceCodec) -> Self:
        """Return a copy of these collectives whose reductions encode slices with ``codec``."""
        found = copy.copy(self)
        found._codec = codec
        return found

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        return self._reduce(out, full, unit, is_added=False)

    def reduce_add(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        return self._reduce(out, full, unit, is_added=True)

    def _reduce(self, out: Tensor, full: Tensor, unit: int, *, is_added: bool) -> Work:
        raise NotImplementedError

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.inference_mode(False):  # inference tensors are read-only in training
            return torch.zeros(numel, dtype=dtype, device=device)

    def launch(self, job: Callable[[], None], *, is_reduction: bool) -> Work:
        return self._queues.launch(job, is_reduction=is_reduction)

    def close(self) -> None:
        """Release resources that only these collectives use. Does not wait for other ranks."""

    def prepare(self, gathered: Gathered, reduced: Reduced, device: torch.device) -> None:
        """Prepare reductions before the first backward. Does nothing on hosts."""

    def _chosen(self, ranks: Sequence[int]) -> list[int]:
        is_sound = len(set(ranks)) == len(ranks) and all(0 <= r < self.world_size for r in ranks)
        if not is_sound or self.rank not in ranks:
            raise ValueError(
                f"subgroup: {list(ranks)} must be different ranks below {self.world_size}, with "
                f"rank {self.rank} among them: every rank gives the subgroup that it is in"
            )
        return [self._members[r] for r in ranks]

    def _check_all_to_all(self, out: Tensor, parts: Tensor) -> None:
        size = self.world_size
        if out.numel() != parts.numel() or out.dtype != parts.dtype or parts.numel() % size:
            raise ValueError(
                f"all_to_all: out has {out.numel()} elements of {out.dtype}, parts "
                f"{parts.numel()} of {parts.dtype}: both must have the same dtype and {size} equal "
                "slices"
            )


class HostCollectives(Transport):
    """Implementation of `zero_core.protocols.TransportCollectives` for CPU ranks."""

    reduces_in_place = True

    def __init__(
        self,
        messages: Messages,
        rank: int,
        shared: SharedMemory | None,
        queues: CommQueues,
        meter: Meter,
        members: Sequence[int] | None = None,
    ) -> None:
        """Connect ``members`` (ranks of ``messages``), by default all. Every rank must call it."""
        super().__init__(rank, queues, meter, members)
        self._messages = messages
        self._shared = shared
        # Start with the next rank, so that ranks do not all send to the same peer first.
        self._peers = [(self.rank + k) % self.world_size for k in range(1, self.world_size)]
        near = frozenset[int]() if shared is None else shared.peers
        self._near = frozenset(peer for peer in self._peers if self._members[peer] in near)
        per_node = self._links.ranks_per_node
        self._is_once_per_node = 1 < per_node < self.world_size
        node = self.rank // per_node if self._is_once_per_node else None
        self._within = [p for p in self._peers if node is None or p // per_node == node]
        self._channel = messages.next_channel()
        self._buffers = _Buffers()
        # Expected bytes of a unit's next encoded messages, by (unit, peer): (sent, received).
        self._expected: dict[tuple[int, int], tuple[int, int]] = {}

    @property
    def exchange_nbytes(self) -> int:
        return self._buffers.nbytes

    def subgroup(self, ranks: Sequence[int]) -> HostCollectives:
        parts = self._messages, self._members[self.rank], self._shared, self._queues, self._meter
        return HostCollectives(*parts, self._chosen(ranks))

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._shared is None or device.type != "cpu":
            return super().zeros(numel, dtype, device)
        with torch.inference_mode(False):  # inference tensors are read-only in training
            return self._shared.zeros(numel, dtype)

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> Work:
        content = GRADIENTS if version == EXACT_GRADIENTS else PARAMETERS
        self._meter.add("all_gather", content, self._links.gather(shard.nbytes))
        slices = out.view(self.world_size, -1).unbind()
        own = slices[self.rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        within, offset = self._within, self._locate(shard)
        parcels = [self._exchange(shard, offset, slices[p], p, Kind.GATHER, unit) for p in within]
        if not self._is_once_per_node:
            return _Several(parcels)
        per_node = self._links.ranks_per_node
        node, place = divmod(self.rank, per_node)
        rows = out.view(-1, per_node, shard.numel())
        others = [(node + k) % len(rows) for k in range(1, len(rows))]
        remote = [
            self._exchange(shard, None, rows[n, place], n * per_node + place, Kind.GATHER, unit)
            for n in others
        ]

        def pass_on() -> None:
            works = []
            for n, parcel in zip(others, remote, strict=True):
                parcel.wait()
                arrived = rows[n, place]
                for peer in within:
                    into = rows[n, peer % per_node]
                    works.append(self._exchange(arrived, None, into, peer, Kind.SPREAD, unit))
            wait_all(parcels)
            wait_all(works)

        return self._queues.launch(pass_on, is_reduction=False)

    def coded(self, codec: SliceCodec) -> Self:
        found = super().coded(codec)
        found._expected = {}
        return found

    def _reduce(self, out: Tensor, full: Tensor, unit: int, *, is_added: bool) -> Work:
        rows = full.view(self.world_size, -1)
        slices = rows.unbind()
        codec, coded = self._codec, list[int]()  # ``coded``: peers that receive encoded slices
        if codec is not None and codec.serves(full.dtype, out.numel()):
            per_node = self._links.ranks_per_node
            coded = [p for p in self._peers if p // per_node != self.rank // per_node]
        is_near = self._locate(full) is not None
        received = None
        if not is_near or len(self._near) < len(self._peers):
            received = self._buffers.take(full.numel(), full.dtype)
        parts = slices if received is None else received.view(self.world_size, -1).unbind()
        exact = [peer for peer in self._peers if peer not in coded]
        parcels = self._exchange_slices(slices, parts, Kind.REDUCE, unit, exact)
        arrival: Work = _DONE
        if codec is not None and coded:
            arrival = self._exchange_coded(codec, rows, parts, coded, unit)
        else:
            self._meter.add("reduce_scatter", GRADIENTS, self._links.direct(slices[0].nbytes))
        sources = list(slices)
        for peer in coded:
            sources[peer] = parts[peer]
        return _HostReduction(
            self, out, sources, parcels, received, unit, arrival, is_near=is_near, is_added=is_added
        )

    def all_to_all(self, out: Tensor, parts: Tensor, *, unit: int) -> Work:
        self._check_all_to_all(out, parts)
        given, slices = (t.view(self.world_size, -1).unbind() for t in (parts, out))
        self._meter.add("all_to_all", GRADIENTS, self._links.direct(given[0].nbytes))
        parcels = self._exchange_slices(given, slices, Kind.SWAP, unit, self._peers)
        slices[self.rank].copy_(given[self.rank])
        is_near = self._locate(parts) is not None
        return _Several(list(parcels.values()), self if is_near else None, unit)

    def _exchange_slices(
        self, given: _Rows, into: _Rows, kind: Kind, unit: int, peers: Sequence[int]
    ) -> dict[int, _Parcel]:
        return {
            p: self._exchange(given[p], self._locate(given[p]), into[p], p, kind, unit)
            for p in peers
        }

    def _locate(self, tensor: Tensor) -> int | None:
        return None if self._shared is None else self._shared.locate(tensor)

    def _exchange(
        self, given: Tensor, offset: int | None, into: Tensor, peer: int, kind: Kind, unit: int
    ) -> _Parcel:
        """Start to send ``given`` to ``peer`` and to receive ``into`` from it.

        A near peer reads ``given`` at ``offset`` of this rank's shared memory. None: by messages.
        """
        if offset is None or peer not in self._near:
            works = [self._receive(into, peer, kind, unit), self._send(given, peer, kind, unit)]
            return _Parcel(into, works)
        assert self._shared is not None, "it has near peers"
        member, tag = self._members[peer], tag_of(self._channel, kind, unit)
        token = self._shared.mailbox.expect(member, tag)
        self._shared.mailbox.post(member, tag, offset, given.nbytes)
        return _Parcel(into, (), self._shared, token)

    def _send(self, given: Tensor, peer: int, kind: Kind, unit: int) -> Work:
        return self._messages.isend(given, self._members[peer], tag_of(self._channel, kind, unit))

    def _receive(self, into: Tensor, peer: int, kind: Kind, unit: int) -> Work:
        return self._messages.irecv(into, self._members[peer], tag_of(self._channel, kind, unit))

    def _acknowledge(self, kind: Kind, unit: int) -> Work:
        """Report to near peers that their bytes were read. The result waits for their reports."""
        tag = tag_of(self._channel, kind, unit)
        assert self._shared is not None, "it has near peers"
        mailbox, near = self._shared.mailbox, [self._members[peer] for peer in self._near]
        reports = [mailbox.expect(member, tag) for member in near]
        for member in near:
            mailbox.post(member, tag, 0, 0)
        return Pending(lambda: [mailbox.wait(report) for report in reports])

    def _exchange_coded(
        self, codec: SliceCodec, slices: Tensor, parts: _Rows, peers: Sequence[int], unit: int
    ) -> Work:
        """Exchange encoded slices with ``peers`` and decode the received ones into ``parts``.

        Receives of the expected lengths start at once. A job sends and decodes messages.
        """
        most = codec.max_nbytes(slices.dtype, slices.shape[1])
        room = coded_room(most)
        first = room * 3 // 4 // _ALIGNMENT * _ALIGNMENT
        buffers = [self._buffers.take(len(peers) * room, torch.uint8) for _ in range(2)]
        given, taken = (dict(zip(peers, b.view(-1, room), strict=True)) for b in buffers)
        expected = {p: self._expected.get((unit, p), (first, first)) for p in peers}
        receives = {
            p: self._receive(taken[p][:of], p, Kind.REDUCE, unit) for p, (_, of) in expected.items()
        }

        def job() -> None:
            sends: list[Work] = []
            sent_nbytes, taken_nbytes = dict[int, int](), dict[int, int]()
            total = 0
            for peer, row in given.items():
                to = expected[peer][0]
                nbytes = int(codec.pack(slices[peer], row[_ALIGNMENT : _ALIGNMENT + most]))
                row[:8].view(torch.int64)[0] = nbytes
                sends.append(self._send(row[:to], peer, Kind.REDUCE, unit))
                rest = row[to : _ALIGNMENT + nbytes]
                if rest.numel():
                    sends.append(self._send(rest, peer, Kind.REDUCE_REST, unit))
                sent_nbytes[peer] = nbytes
                total += max(to, _ALIGNMENT + nbytes)
            for peer, row in taken.items():
                receives[peer].wait()
                nbytes = int(row[:8].view(torch.int64))
                check_announced(nbytes, most, self._members[self.rank], self._members[peer])
                rest = row[expected[peer][1] : _ALIGNMENT + nbytes]
                if rest.numel():
                    self._receive(rest, peer, Kind.REDUCE_REST, unit).wait()
                message = row[_ALIGNMENT : _ALIGNMENT + nbytes]
                codec.unpack(message, parts[peer], sender=self._members[peer], unit=unit)
                taken_nbytes[peer] = nbytes
            wait_all(sends)
            for peer in peers:
                both = sent_nbytes[peer], taken_nbytes[peer]
                to, of = (min(room, coded_room(nbytes + nbytes // _SLACK)) for nbytes in both)
                self._expected[unit, peer] = to, of
            for buffer in buffers:
                self._buffers.release(buffer)
            near_nbytes, _ = self._links.direct(slices[0].nbytes)
            self._meter.add("reduce_scatter", GRADIENTS, (near_nbytes, total))

        return self._queues.launch(job, is_reduction=True)


@dataclass(slots=True, eq=False)
class _Parcel:
    """A pending exchange with one peer."""

    into: Tensor
    works: Sequence[Work]
    shared: SharedMemory | None = None
    token: Letter | None = None  # set if the bytes are read in the peer's window

    def receive(self) -> Tensor:
        """Wait for the peer's bytes. Return ``into`` or, with ``token``, a view of its window."""
        if self.shared is not None and self.token is not None:
            return self.shared.receive(self.token, self.into)
        wait_all(self.works)
        return self.into

    def wait(self) -> None:
        """Wait until the peer's bytes are in ``into``. Must not be called twice."""
        found = self.receive()
        if found.data_ptr() != self.into.data_ptr():
            self.into.copy_(found)


@dataclass(eq=False)
class _Several:
    """Several works as one. With ``reader``, `wait` also acknowledges near peers' slices."""

    works: Sequence[Work]
    reader: HostCollectives | None = None
    unit: int = 0

    def wait(self) -> None:
        """Wait for all works. Further calls do nothing."""
        works, self.works = self.works, ()
        wait_all(works)
        reader, self.reader = self.reader, None
        if reader is not None:
            reader._acknowledge(Kind.SWAP_READ, self.unit).wait()


_DONE = _Several(())


@dataclass(eq=False)
class _HostReduction:
    """A pending reduction: `zero_core.protocols.InPlaceReduction`."""

    owner: HostCollectives
    out: Tensor
    # Between `wait` and `acknowledge`: each rank's contribution to ``out``, in rank order.
    contributions: list[Tensor]
    parcels: dict[int, _Parcel]
    received: Tensor | None
    unit: int
    arrival: Work
    is_near: bool
    is_added: bool
    is_summed: bool = False

    def wait(self) -> None:
        """Write the slices' sum to ``out`` or add it, in rank order. Further calls do nothing."""
        if not self.is_summed:
            self.is_summed = True
            self.arrival.wait()
            for peer, parcel in self.parcels.items():
                self.contributions[peer] = parcel.receive()
            add_up = add_in_rank_order if self.is_added else sum_in_rank_order
            add_up(self.out, self.contributions)

    def acknowledge(self) -> Work:
        """Release the scratch buffer, and acknowledge near peers' slices."""
        self.contributions = []
        if self.received is not None:
            self.owner._buffers.release(self.received)
        return self.owner._acknowledge(Kind.REDUCE_READ, self.unit) if self.is_near else _DONE


class _Buffers:
    """Pool of buffers for received and encoded slices. Any thread may use it."""

    def __init__(self) -> None:
        self.nbytes = 0  # bytes allocated so far
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        free = self._free.setdefault((numel, dtype), [])
        try:
            return free.pop()  # no prior check: another thread may pop the last buffer
        except IndexError:
            self.nbytes += numel * dtype.itemsize
            with torch.inference_mode(False):  # inference tensors are read-only in training
                return torch.empty(numel, dtype=dtype)

    def release(self, buffer: Tensor) -> None:
        self._free[buffer.numel(), buffer.dtype].append(buffer)


def coded_room(max_nbytes: int) -> int:
    """Return the bytes of a buffer for a length field and a message of at most ``max_nbytes``."""
    return _ALIGNMENT + -(-max_nbytes // _ALIGNMENT) * _ALIGNMENT


def check_announced(nbytes: int, most: int, rank: int, sender: int, *, multiple: int = 1) -> None:
    """Raise CollectiveError unless 0 <= ``nbytes`` <= ``most`` and ``multiple`` divides it."""
    if not 0 <= nbytes <= most or nbytes % multiple:
        raise CollectiveError(
            f"rank {rank} expects at most {most} bytes of a coded gradient of rank {sender}, which "
            f"announces {nbytes}: the ranks reduce different units"
        )


class HostLibrary:
    """`ControlLibrary` of CPU ranks. See [Note: messages of different sizes never meet]."""

    def __init__(self, messages: Messages, *, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._messages = messages
        self._peers = [(rank + k) % world_size for k in range(1, world_size)]

    def all_gather(self, out: Tensor, shard: Tensor) -> Work:
        rows = out.view(self.world_size, shard.numel())
        return self._gather(rows, shard, Kind.CONTROL_GATHER)

    def _gather(self, rows: Tensor, own: Tensor, kind: Kind) -> Work:
        works = [self._receive(rows[p], p, kind) for p in self._peers]
        works += [self._send(own, p, kind) for p in self._peers]
        if rows[self.rank].data_ptr() != own.data_ptr():
            rows[self.rank].copy_(own)
        return _Several(works)

    def exchange(
        self, out: Tensor, parts: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Work:
        given, slots = torch.split(parts, list(sent)), torch.split(out, list(received))
        kind = Kind.CONTROL_EXCHANGE
        works = [self._receive(slots[p], p, kind) for p in self._peers if received[p]]
        works += [self._send(given[p], p, kind) for p in self._peers if sent[p]]
        slots[self.rank].copy_(given[self.rank])
        return _Several(works)

    def all_reduce(self, values: Tensor) -> Work:
        rows = values.new_empty(self.world_size, values.numel())
        own = rows[self.rank]  # a copy: after an exception, pending sends still read it
        own.copy_(values.view(-1))
        work = self._gather(rows, own, Kind.CONTROL_SUM)

        def add_up() -> None:
            work.wait()
            first, *others = rows
            add_in_rank_order(first, others)
            values.copy_(first.view_as(values))

        return Pending(add_up)

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        """Wait for ``tensor`` and forward it along a binomial tree."""
        size = self.world_size
        place = (self.rank - source) % size
        # ``place`` without its lowest set bit is its parent. With a lower bit set, it is a child.
        reach = place & -place if place else 1 << (size - 1).bit_length()
        flat = tensor.view(-1)
        if place:
            self._receive(flat, (source + place - reach) % size, Kind.CONTROL_BROADCAST).wait()
        works = []
        while reach > 1:
            reach //= 2
            if place + reach < size:
                target = (source + place + reach) % size
                works.append(self._send(flat, target, Kind.CONTROL_BROADCAST))
        return _Several(works)

    def _send(self, tensor: Tensor, target: int, kind: Kind) -> Work:
        tag = tag_of(CONTROL_CHANNEL, kind, tensor.nbytes % _NUM_SIZES)
        return self._messages.isend(tensor, target, tag)

    def _receive(self, tensor: Tensor, source: int, kind: Kind) -> Work:
        tag = tag_of(CONTROL_CHANNEL, kind, tensor.nbytes % _NUM_SIZES)
        return self._messages.irecv(tensor, source, tag)
