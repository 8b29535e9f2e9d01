"""Collectives among hosts, by direct exchange between each pair of ranks.

gloo's own all-gather is a ring of copies and its reduce-scatter a whole all-reduce. A direct
exchange takes about a third of the time. [Note: near and far] in `zero_core.comm.p2p` explains what
is sent.

[Note: once per node]
Where there are several nodes of several ranks, a shard is sent to each other node once, to the rank
in the same place there, which passes it on within its node: (N - 1) shards between nodes instead of
(N - 1) R, on the narrower link. Passing on needs the shard to be there, so the gather is a job of
the queue of gathers. Reductions stay direct, W - R slices between nodes: a sum taken within the
node first would be another sum.

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

import torch
from torch import Tensor

from zero_core.comm.fused_sum import add_in_rank_order, sum_in_rank_order
from zero_core.comm.meter import GRADIENTS, PARAMETERS, Links, Meter
from zero_core.comm.p2p import (
    CONTROL_CHANNEL,
    CodedSlices,
    ExchangeBuffers,
    Kind,
    Messages,
    Parcel,
    PeerToPeer,
    tag_of,
    wait_all,
)
from zero_core.comm.queues import CommQueues, Pending
from zero_core.comm.shared_memory import SharedMemory
from zero_core.protocols import EXACT_GRADIENTS, SliceCodec, Work

_NUM_SIZES = 32_749
"""The largest prime below 2**15: tags are 31 bits."""


class Transport:
    """Base of the collectives of hosts and of accelerators: jobs, counting, scratch memory."""

    def __init__(self, rank: int, links: Links, queues: CommQueues, meter: Meter) -> None:
        self._meter = meter
        self._queues = queues
        self.rank = rank
        self.world_size = links.world_size
        self._links = links

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

    def _check_subgroup(self, ranks: Sequence[int]) -> None:
        is_sound = len(set(ranks)) == len(ranks) and all(0 <= r < self.world_size for r in ranks)
        if not is_sound or self.rank not in ranks:
            raise ValueError(
                f"subgroup: {list(ranks)} must be different ranks below {self.world_size}, with "
                f"rank {self.rank} among them: every rank gives the subgroup that it is in"
            )

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
    ) -> None:
        """Every rank makes one. ``meter`` knows the links, and counts what is sent over them."""
        super().__init__(rank, meter.links, queues, meter)
        self._shared = shared
        self._coded: CodedSlices | None = None
        self._buffers = ExchangeBuffers()
        self._wire = PeerToPeer(messages, range(self.world_size), rank, shared)

    @property
    def exchange_nbytes(self) -> int:
        return self._buffers.nbytes

    def subgroup(self, ranks: Sequence[int]) -> HostCollectives:
        self._check_subgroup(ranks)
        found = copy.copy(self)
        found._wire = self._wire.among(ranks)
        found._coded = None  # it would send to the ranks of the whole group
        found._buffers = ExchangeBuffers()
        found._links = self._links.among(ranks)
        found.rank, found.world_size = found._wire.rank, len(ranks)
        return found

    def coded(self, codec: SliceCodec) -> HostCollectives:
        """[Note: coded slices] in `zero_core.comm.p2p` explains what is sent."""
        found = copy.copy(self)
        found._coded = CodedSlices(codec, self._wire, self._buffers)
        return found

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._shared is None or device.type != "cpu":
            return super().zeros(numel, dtype, device)
        with torch.inference_mode(False):  # it serves training too
            return self._shared.zeros(numel, dtype)

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> Work:
        self._count("all_gather", version, self._links.gather(shard.nbytes))
        slices = out.view(self.world_size, -1)
        own = slices[self.rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        per_node, wire = self._links.ranks_per_node, self._wire
        node, place = divmod(self.rank, per_node)
        is_once_per_node = 1 < per_node < self.world_size
        within = [p for p in wire.peers if p // per_node == node or not is_once_per_node]
        offset = wire.locate(shard)
        parcels = [wire.exchange(shard, offset, slices[p], p, Kind.GATHER, unit) for p in within]
        if not is_once_per_node:
            return _Several(parcels)
        rows = out.view(-1, per_node, shard.numel())
        others = [(node + k) % len(rows) for k in range(1, len(rows))]
        remote = [
            wire.exchange(shard, None, rows[n, place], n * per_node + place, Kind.GATHER, unit)
            for n in others
        ]

        def pass_on() -> None:
            works = []
            for n, parcel in zip(others, remote, strict=True):
                parcel.wait()
                arrived = rows[n, place]
                for peer in within:
                    into = rows[n, peer % per_node]
                    works.append(wire.exchange(arrived, None, into, peer, Kind.SPREAD, unit))
            wait_all(parcels)
            wait_all(works)

        return self._queues.launch(pass_on, is_reduction=False)

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        return self._reduce(out, full, unit, is_added=False)

    def reduce_add(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        return self._reduce(out, full, unit, is_added=True)

    def _reduce(self, out: Tensor, full: Tensor, unit: int, *, is_added: bool) -> Work:
        wire = self._wire
        slices = full.view(self.world_size, -1)
        codes, coded = self._coded, list[int]()  # peers that are sent messages, not slices
        if codes is not None and codes.codec.serves(full.dtype, out.numel()):
            per_node = self._links.ranks_per_node
            coded = [p for p in wire.peers if p // per_node != self.rank // per_node]
        is_near = wire.locate(full) is not None
        received = None
        if not is_near or wire.has_far:
            received = self._buffers.take(full.numel(), full.dtype)
        parts = slices if received is None else received.view(self.world_size, -1)
        exact = [peer for peer in wire.peers if peer not in coded]
        parcels = self._exchange_slices(slices, parts, Kind.REDUCE, unit, exact)
        arrival: Work = _DONE
        sent = self._links.direct(slices[0].nbytes)
        if codes is not None and coded:
            finish = codes.start(slices, parts, coded, unit)

            def job() -> None:
                self._count("reduce_scatter", EXACT_GRADIENTS, (sent[0], finish()))

            arrival = self._queues.launch(job, is_reduction=True)
        else:
            self._count("reduce_scatter", EXACT_GRADIENTS, sent)
        sources = list(slices)
        for peer in coded:
            sources[peer] = parts[peer]
        return _HostReduction(
            self, out, sources, parcels, received, unit, arrival, is_near=is_near, is_added=is_added
        )

    def all_to_all(self, out: Tensor, parts: Tensor, *, unit: int) -> Work:
        self._check_all_to_all(out, parts)
        given, slices = parts.view(self.world_size, -1), out.view(self.world_size, -1)
        self._count("all_to_all", EXACT_GRADIENTS, self._links.direct(given[0].nbytes))
        parcels = self._exchange_slices(given, slices, Kind.SWAP, unit, self._wire.peers)
        slices[self.rank].copy_(given[self.rank])
        is_near = self._wire.locate(parts) is not None
        return _Several(list(parcels.values()), self._wire if is_near else None, unit)

    def _exchange_slices(
        self, given: Tensor, into: Tensor, kind: Kind, unit: int, peers: Sequence[int]
    ) -> dict[int, Parcel]:
        wire = self._wire
        return {
            p: wire.exchange(given[p], wire.locate(given[p]), into[p], p, kind, unit) for p in peers
        }

    def _count(self, collective: str, version: int, sent: tuple[int, int]) -> None:
        if self.world_size > 1:
            content = GRADIENTS if version == EXACT_GRADIENTS else PARAMETERS
            self._meter.add(collective, content, sent)


@dataclass(eq=False)
class _Several:
    """Works that are waited for together. An all-to-all then acknowledges over ``wire``."""

    works: Sequence[Work]
    wire: PeerToPeer | None = None
    unit: int = 0

    def wait(self) -> None:
        """Wait for all. At the first call: a peer's bytes are read once."""
        works, self.works = self.works, ()
        wait_all(works)
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.acknowledge(Kind.SWAP_READ, self.unit).wait()


_DONE = _Several(())


@dataclass(eq=False)
class _HostReduction:
    """A reduction under way: `zero_core.protocols.InPlaceReduction`."""

    owner: HostCollectives
    out: Tensor
    sources: list[Tensor]  # this rank's slices, or places that ``arrival`` fills; then every part
    parcels: dict[int, Parcel]
    received: Tensor | None
    unit: int
    arrival: Work
    is_near: bool
    is_added: bool

    def __post_init__(self) -> None:
        self.contributions: Sequence[Tensor] = self.sources

    def wait(self) -> None:
        """Sum in rank order, to what is in ``out`` if ``is_added``. Once."""
        if self.sources:
            sources, self.sources = self.sources, []
            self.arrival.wait()
            for peer, parcel in self.parcels.items():
                sources[peer] = parcel.receive()
            (add_in_rank_order if self.is_added else sum_in_rank_order)(self.out, sources)

    def acknowledge(self) -> Work:
        """End the reduction: its scratch buffer is free, its near parts were read."""
        self.contributions = ()
        if self.received is not None:
            self.owner._buffers.release(self.received)
        return self.owner._wire.acknowledge(Kind.REDUCE_READ, self.unit) if self.is_near else _DONE


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
        slices = out.view(self.world_size, shard.numel())
        works = [self._receive(slices[p], p, Kind.CONTROL_GATHER) for p in self._peers]
        works += [self._send(shard, p, Kind.CONTROL_GATHER) for p in self._peers]
        if slices[self.rank].data_ptr() != shard.data_ptr():
            slices[self.rank].copy_(shard)
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
        rows[self.rank] = values.view(-1)
        works = [self._receive(rows[p], p, Kind.CONTROL_SUM) for p in self._peers]
        works += [self._send(rows[self.rank], p, Kind.CONTROL_SUM) for p in self._peers]

        def add_up() -> None:
            wait_all(works)
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
