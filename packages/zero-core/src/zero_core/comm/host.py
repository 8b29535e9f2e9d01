"""Collectives among hosts, by direct exchange between each pair of ranks.

gloo's own all-gather is a ring of copies and its reduce-scatter a whole all-reduce. A direct
exchange takes about a third of the time.

[Note: near and far]
A **far** peer gets the bytes themselves, point to point over torch.distributed. A **near** peer
shares memory (`zero_core.comm.shared_memory`) and gets a **token**: the offset and number of the
bytes, which it reads in place when it waits. So a gather costs one copy and a reduction none.
Ordinary memory (a plug-in's buffers) is sent as to a far peer; all ranks use the same kind in the
same call.

Near bytes must not change while a peer may still read them. Reductions and all-to-alls therefore
end with an **acknowledgement**. Gathers have none: shards change only after an exchange of all
ranks that have waited for their gathers (`zero_core.protocols.Collectives`).

[Note: once per node]
Where there are several nodes of several ranks, a shard is sent to each other node once, to the rank
in the same place there, which passes it on within its node: (N - 1) shards between nodes instead of
(N - 1) R, on the narrower link. Passing on needs the shard to be there, so the gather is a job of
the queue of gathers. Reductions stay direct, W - R slices between nodes: a sum taken within the
node first would be another sum.

[Note: coded slices]
With a codec (`zero_core.protocols.SliceCodec`) a rank of another node gets a message of its slice.
It is decoded to the place where the slice itself would have arrived, so the sum, its order and each
rank's part are the same. Coding is a job of the queue of reductions: it takes a pass over the
slices, while backward goes on.

A message's length is not known before. Both ranks know how long the last one of the unit was, and
expect a little more. So many bytes are sent, with the true length in front, and their receiver asks
for them before they are made. What is longer is sent as a second part. (A length that travels first
waits behind other data in the queue of the link: 18 ms per unit at 200 Mbit/s.)

[Note: messages of different sizes never meet]
Ranks that take different branches start different exchanges. gloo's collectives match them by their
order alone, and where two of different sizes meet, gloo ends the process of the receiver with
``std::terminate``. `HostLibrary` finds a message by its sender and its tag, which has the exchange
and the number of bytes (modulo `_NUM_SIZES`). So ranks on different branches wait for each other,
until the wait's timeout raises an error that names them.
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
from zero_core.protocols import EXACT_GRADIENTS, SliceCodec, Work

_ALIGNMENT = 64
"""Bytes at whose multiples messages of coded slices begin, and of the length in front of each."""
_SLACK = 128
"""A message is expected to be at most longer than the last one by one part in so many."""
_NUM_SIZES = 32_749
"""The largest prime below 2**15: tags are 31 bits."""


class Transport:
    """Base of the collectives of hosts and of accelerators."""

    def __init__(
        self, rank: int, queues: CommQueues, meter: Meter, members: Sequence[int] | None
    ) -> None:
        """``members`` of the ranks of ``meter`` take part, ``rank`` among them. None: all."""
        self._meter = meter
        self._queues = queues
        self._links = meter.links if members is None else meter.links.among(members)
        self._members = range(self._links.world_size) if members is None else members
        self.rank = self._members.index(rank)
        self.world_size = len(self._members)
        self._codec: SliceCodec | None = None

    def coded(self, codec: SliceCodec) -> Self:
        """See [Note: coded slices], and [Note: coded exchanges] in `zero_core.comm.device`."""
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
        with torch.inference_mode(False):  # it serves training too
            return torch.zeros(numel, dtype=dtype, device=device)

    def launch(self, job: Callable[[], None], *, is_reduction: bool) -> Work:
        return self._queues.launch(job, is_reduction=is_reduction)

    def close(self) -> None:
        """End what was made for these collectives alone, on this rank alone."""

    def prepare_reductions(
        self, wanted: Sequence[tuple[int, torch.dtype, torch.dtype]], device: torch.device
    ) -> None:
        """Allocate and compile on ``device`` what reductions need, ahead of the first backward.

        ``wanted``: the elements of each gradient to be reduced, its dtype and that of its sum.
        """

    def _chosen(self, ranks: Sequence[int]) -> list[int]:
        """Return the members of the subgroup ``ranks``, which this rank is to be in."""
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
    """`zero_core.protocols.TransportCollectives` among hosts."""

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
        """Every rank makes one. ``members`` have the numbers of ``messages``."""
        super().__init__(rank, queues, meter, members)
        self._messages = messages
        self._shared = shared
        # From the right neighbour on, so that no rank is everybody's first target.
        self._peers = [(self.rank + k) % self.world_size for k in range(1, self.world_size)]
        near = frozenset[int]() if shared is None else shared.peers
        self._near = frozenset(peer for peer in self._peers if self._members[peer] in near)
        self._channel = messages.next_channel()
        self._buffers = _Buffers()
        # Bytes that are expected of a unit's next message, by peer: to it, and from it.
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
        with torch.inference_mode(False):  # it serves training too
            return self._shared.zeros(numel, dtype)

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> Work:
        content = GRADIENTS if version == EXACT_GRADIENTS else PARAMETERS
        self._meter.add("all_gather", content, self._links.gather(shard.nbytes))
        slices = out.view(self.world_size, -1)
        own = slices[self.rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        per_node = self._links.ranks_per_node
        node, place = divmod(self.rank, per_node)
        is_once_per_node = 1 < per_node < self.world_size
        within = [p for p in self._peers if p // per_node == node or not is_once_per_node]
        offset = self._locate(shard)
        parcels = [self._exchange(shard, offset, slices[p], p, Kind.GATHER, unit) for p in within]
        if not is_once_per_node:
            return _Several(parcels)
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
        slices = full.view(self.world_size, -1)
        codec, coded = self._codec, list[int]()  # peers that are sent messages, not slices
        if codec is not None and codec.serves(full.dtype, out.numel()):
            per_node = self._links.ranks_per_node
            coded = [p for p in self._peers if p // per_node != self.rank // per_node]
        is_near = self._locate(full) is not None
        received = None
        if not is_near or len(self._near) < len(self._peers):
            received = self._buffers.take(full.numel(), full.dtype)
        parts = slices if received is None else received.view(self.world_size, -1)
        exact = [peer for peer in self._peers if peer not in coded]
        parcels = self._exchange_slices(slices, parts, Kind.REDUCE, unit, exact)
        arrival: Work = _DONE
        if codec is not None and coded:
            arrival = self._exchange_coded(codec, slices, parts, coded, unit)
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
        given, slices = parts.view(self.world_size, -1), out.view(self.world_size, -1)
        self._meter.add("all_to_all", GRADIENTS, self._links.direct(given[0].nbytes))
        parcels = self._exchange_slices(given, slices, Kind.SWAP, unit, self._peers)
        slices[self.rank].copy_(given[self.rank])
        is_near = self._locate(parts) is not None
        return _Several(list(parcels.values()), self if is_near else None, unit)

    def _exchange_slices(
        self, given: Tensor, into: Tensor, kind: Kind, unit: int, peers: Sequence[int]
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
        """Start to exchange as many elements with a peer. ``offset`` is that of ``given``."""
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
        """Report to the near peers that their bytes were read. Waiting waits for their reports."""
        tag = tag_of(self._channel, kind, unit)
        assert self._shared is not None, "it has near peers"
        mailbox, near = self._shared.mailbox, [self._members[peer] for peer in self._near]
        reports = [mailbox.expect(member, tag) for member in near]
        for member in near:
            mailbox.post(member, tag, 0, 0)
        return Pending(lambda: [mailbox.wait(report) for report in reports])

    def _exchange_coded(
        self, codec: SliceCodec, slices: Tensor, parts: Tensor, peers: Sequence[int], unit: int
    ) -> Work:
        """Exchange messages with ``peers``, whose slices are decoded to ``parts``.

        Theirs are asked for here. A job codes and sends this rank's, and decodes theirs.
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
                nbytes = codec.pack(slices[peer], row[_ALIGNMENT : _ALIGNMENT + most])
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
                codec.unpack(message, parts[peer], sender=self._members[peer])
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
    """One peer's bytes on their way."""

    into: Tensor
    works: Sequence[Work]
    shared: SharedMemory | None = None
    token: Letter | None = None  # of a near peer

    def receive(self) -> Tensor:
        """Wait, and return the peer's bytes: far ones in ``into``, near ones in place."""
        if self.shared is not None and self.token is not None:
            return self.shared.receive(self.token, self.into)
        wait_all(self.works)
        return self.into

    def wait(self) -> None:
        """Wait, and copy the peer's bytes to ``into`` if they are not there. Once."""
        found = self.receive()
        if found.data_ptr() != self.into.data_ptr():
            self.into.copy_(found)


@dataclass(eq=False)
class _Several:
    """Works that are waited for together. An all-to-all of near bytes then acknowledges them."""

    works: Sequence[Work]
    reader: HostCollectives | None = None
    unit: int = 0

    def wait(self) -> None:
        """Wait for all. At the first call: a peer's bytes are read once."""
        works, self.works = self.works, ()
        wait_all(works)
        reader, self.reader = self.reader, None
        if reader is not None:
            reader._acknowledge(Kind.SWAP_READ, self.unit).wait()


_DONE = _Several(())


@dataclass(eq=False)
class _HostReduction:
    """A reduction under way: `zero_core.protocols.InPlaceReduction`."""

    owner: HostCollectives
    out: Tensor
    # This rank's slices, or places that ``arrival`` fills. After `wait`, every rank's part.
    contributions: list[Tensor]
    parcels: dict[int, _Parcel]
    received: Tensor | None
    unit: int
    arrival: Work
    is_near: bool
    is_added: bool
    is_summed: bool = False

    def wait(self) -> None:
        """Sum in rank order, to what is in ``out`` if ``is_added``. Once."""
        if not self.is_summed:
            self.is_summed = True
            self.arrival.wait()
            for peer, parcel in self.parcels.items():
                self.contributions[peer] = parcel.receive()
            add_up = add_in_rank_order if self.is_added else sum_in_rank_order
            add_up(self.out, self.contributions)

    def acknowledge(self) -> Work:
        """End the reduction: its scratch buffer is free, its near parts were read."""
        self.contributions = []
        if self.received is not None:
            self.owner._buffers.release(self.received)
        return self.owner._acknowledge(Kind.REDUCE_READ, self.unit) if self.is_near else _DONE


class _Buffers:
    """Buffers for what arrives in reductions, kept from one to the next. Any thread may ask."""

    def __init__(self) -> None:
        self.nbytes = 0  # of all of them
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
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


def check_announced(nbytes: int, most: int, rank: int, sender: int, *, multiple: int = 1) -> None:
    """Refuse the length of a message that ``sender`` cannot have coded for ``rank``."""
    if not 0 <= nbytes <= most or nbytes % multiple:
        raise CollectiveError(
            f"rank {rank} expects at most {most} bytes of a coded gradient of rank {sender}, which "
            f"announces {nbytes}: the ranks reduce different units"
        )


class HostLibrary:
    """`ControlLibrary` among hosts. See [Note: messages of different sizes never meet]."""

    def __init__(
        self, messages: Messages, *, rank: int, world_size: int, channel: int = CONTROL_CHANNEL
    ) -> None:
        """``channel`` is another one for a thread beside the others'."""
        self.rank = rank
        self.world_size = world_size
        self._messages = messages
        self._channel = channel
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
        own = rows[self.rank]  # a send that was left by an exception reads it, not ``values``
        own.copy_(values.view(-1))
        work = self._gather(rows, own, Kind.CONTROL_SUM)

        def add_up() -> None:
            work.wait()
            first, *others = rows
            add_in_rank_order(first, others)
            values.copy_(first.view_as(values))

        return Pending(add_up)

    def broadcast(self, tensor: Tensor, *, source: int) -> Work:
        """A binomial tree: no rank sends more than log2(ranks) times."""
        size = self.world_size
        place = (self.rank - source) % size
        # A rank receives from the one without its lowest bit, and sends to those with lower bits.
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
        tag = tag_of(self._channel, kind, tensor.nbytes % _NUM_SIZES)
        return self._messages.isend(tensor, target, tag)

    def _receive(self, tensor: Tensor, source: int, kind: Kind) -> Work:
        tag = tag_of(self._channel, kind, tensor.nbytes % _NUM_SIZES)
        return self._messages.irecv(tensor, source, tag)
