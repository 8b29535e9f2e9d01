"""The direct exchange: on hosts, every rank hands each other rank just what that one needs.

gloo's own all-gather is a ring of copies and its reduce-scatter a whole all-reduce; a direct
exchange moves the same bytes in about a third of the time (docs/decisions.md). What travels, and
how, is in [Note: near and far] in `zero_core.wire`.

[Note: once per node]
Where there are several nodes of several ranks, a shard is sent to each other node once, to the rank
in the same place there, which hands it on within its node: (N - 1) shards between nodes instead of
(N - 1) R, on the link that is the narrow one. Handing on needs the shard to be there, so that the
gather is a job of the lane of gathers. Reductions stay direct, W - R slices between nodes: a sum
taken within the node first would be another sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zero_core.arena import allocator
from zero_core.collectives import sum_in_rank_order
from zero_core.comm_report import GRADIENTS, PARAMETERS, Meter
from zero_core.lanes import HostLanes, Lanes
from zero_core.protocols import EXACT_GRADIENTS, Work
from zero_core.shared_memory import SharedMemory
from zero_core.traffic import Links
from zero_core.wire import Kind, Wire, arrived

__all__ = ["DirectCollectives", "Exchange"]


class DirectCollectives:
    """`zero_core.protocols.NativeCollectives` among hosts; see there for the contract."""

    has_retire = True
    """Works of reductions have ``retire``."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        rank: int,
        world_size: int,
        shared: SharedMemory | None = None,
        ranks_per_node: int | None = None,
        lanes: Lanes | None = None,
        meter: Meter | None = None,
    ) -> None:
        """Every rank makes one.

        Args:
            group: None means the default group, or none at all if ``world_size`` is 1.
            rank: this rank.
            world_size: number of ranks.
            shared: memory that some of them read from each other.
            ranks_per_node: how many consecutive ranks share a node; None: all.
            lanes: where jobs run; threads, if not given.
            meter: counts what is sent.
        """
        self._set_up(
            Wire(group, range(world_size), rank=rank, shared=shared),
            Links(world_size, ranks_per_node or world_size, is_ring=False),
            HostLanes() if lanes is None else lanes,
            Meter() if meter is None else meter,
            shared,
        )

    def _set_up(
        self,
        wire: Wire,
        links: Links,
        lanes: Lanes,
        meter: Meter,
        shared: SharedMemory | None,
    ) -> None:
        self.rank = wire.rank
        self.world_size = len(wire.members)
        self._wire = wire
        self._links = links
        self._is_once_per_node = 1 < links.ranks_per_node < links.world_size
        self._lanes = lanes
        self._meter = meter
        self._shared = shared
        self._scratch: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def subgroup(self, ranks: Sequence[int]) -> DirectCollectives:
        """See `zero_core.protocols.NativeCollectives.subgroup`."""
        check_subgroup(ranks, self.rank, self.world_size)
        found = DirectCollectives.__new__(DirectCollectives)
        wire, links = self._wire.among(ranks), self._links.among(ranks)
        found._set_up(wire, links, self._lanes, self._meter, self._shared)
        return found

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `zero_core.protocols.NativeCollectives.zeros`."""
        with torch.inference_mode(False):  # it serves training too
            if self._shared is not None and device.type == "cpu":
                return self._shared.zeros(numel, dtype)
            return allocator(device)(numel, dtype).zero_()

    def launch(self, job: Callable[[], None], *, is_reduction: bool) -> Work:
        """See `zero_core.protocols.NativeCollectives.launch`."""
        return self._lanes.launch(job, is_reduction=is_reduction)

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> Work:
        """See `zero_core.protocols.Collectives.all_gather`."""
        self._count("all_gather", version, self._links.gather(shard.nbytes))
        own = out.view(self.world_size, -1)[self.rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        if self._is_once_per_node:
            return self._gather_once_per_node(out, shard, unit)
        return Exchange(self._start_gather(out, shard, self._wire.peers, unit))

    def _start_gather(
        self, out: Tensor, shard: Tensor, peers: Sequence[int], unit: int
    ) -> Callable[[], None]:
        """Trade ``shard`` with ``peers``; what has theirs in ``out`` when it returns."""
        slices = out.view(self.world_size, -1)
        wire = self._wire
        place = wire.locate(shard)
        parcels = [wire.trade(shard, place, slices[p], p, Kind.GATHER, unit) for p in peers]

        def finish() -> None:
            for peer, parcel in zip(peers, parcels, strict=True):
                found = parcel()
                if found.data_ptr() != slices[peer].data_ptr():
                    slices[peer].copy_(found)

        return finish

    def _gather_once_per_node(self, out: Tensor, shard: Tensor, unit: int) -> Work:
        """See [Note: once per node]."""
        per_node, wire = self._links.ranks_per_node, self._wire
        rows = out.view(-1, per_node, shard.numel())
        node, place = divmod(self.rank, per_node)
        others = [(node + k) % len(rows) for k in range(1, len(rows))]
        within = [p for p in wire.peers if p // per_node == node]
        finish = self._start_gather(out, shard, within, unit)
        remote = {
            n: wire.swap(shard, rows[n, place], n * per_node + place, Kind.GATHER, unit)
            for n in others
        }

        def hand_on() -> None:
            works = []
            for n in others:
                arrived(remote[n], rows)
                for peer in within:
                    into = rows[n, peer % per_node]
                    works += wire.swap(rows[n, place], into, peer, Kind.SPREAD, unit)
            finish()
            arrived(works, rows)

        return self._lanes.launch(hand_on, is_reduction=False)

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        """See `zero_core.protocols.Collectives.reduce_scatter`."""
        wire = self._wire
        slices = full.view(self.world_size, -1)
        self._count("reduce_scatter", EXACT_GRADIENTS, self._links.direct(slices[0].nbytes))
        is_near = wire.locate(full) is not None
        received = None if is_near and not wire.has_far else self._borrow(full)
        parts = slices if received is None else received.view(self.world_size, -1)
        parcels = self._trade_slices(slices, parts, Kind.REDUCE, unit)
        sources = list(slices)

        def finish() -> None:
            for peer, parcel in parcels.items():
                sources[peer] = parcel()
            sum_in_rank_order(out, sources)

        def retire() -> Callable[[], None]:
            if received is not None:
                self._scratch[received.numel(), received.dtype].append(received)
            return wire.acknowledge(Kind.REDUCE_READ, unit) if is_near else _nothing

        return Exchange(finish, sources, retire)

    def all_to_all(self, out: Tensor, parts: Tensor, *, unit: int) -> Work:
        """See `zero_core.protocols.NativeCollectives.all_to_all`."""
        check_all_to_all(out, parts, self.world_size)
        given, slices = parts.view(self.world_size, -1), out.view(self.world_size, -1)
        self._count("all_to_all", EXACT_GRADIENTS, self._links.direct(given[0].nbytes))
        parcels = self._trade_slices(given, slices, Kind.SWAP, unit)
        is_near = self._wire.locate(parts) is not None
        slices[self.rank].copy_(given[self.rank])

        def finish() -> None:
            for peer, parcel in parcels.items():
                found = parcel()
                if found.data_ptr() != slices[peer].data_ptr():
                    slices[peer].copy_(found)
            if is_near:
                self._wire.acknowledge(Kind.SWAP_READ, unit)()

        return Exchange(finish)

    def _trade_slices(
        self, given: Tensor, into: Tensor, kind: Kind, unit: int
    ) -> dict[int, Callable[[], Tensor]]:
        """Trade a slice with each peer, by peer."""
        wire = self._wire
        return {
            p: wire.trade(given[p], wire.locate(given[p]), into[p], p, kind, unit)
            for p in wire.peers
        }

    def _count(self, collective: str, version: int, sent: tuple[int, int]) -> None:
        if self.world_size > 1:
            content = GRADIENTS if version == EXACT_GRADIENTS else PARAMETERS
            self._meter.add(collective, content, sent)

    def _borrow(self, like: Tensor) -> Tensor:
        free = self._scratch.setdefault((like.numel(), like.dtype), [])
        try:
            return free.pop()  # another thread may have taken the last one
        except IndexError:
            return torch.empty_like(like)


class Exchange:
    """An exchange under way."""

    def __init__(
        self,
        finish: Callable[[], None],
        contributions: Sequence[Tensor] = (),
        retire: Callable[[], Callable[[], None]] | None = None,
    ) -> None:
        self.contributions = contributions
        self._finish: Callable[[], None] | None = finish
        self._retire = retire

    def wait(self) -> None:
        """Bring the result about; once."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def retire(self) -> Callable[[], None]:
        """See `zero_core.protocols.Collectives.reduce_scatter`; after ``wait``, once."""
        self.contributions = ()
        return _nothing if self._retire is None else self._retire()


def check_all_to_all(out: Tensor, parts: Tensor, world_size: int) -> None:
    """Refuse buffers that do not make ``world_size`` equal slices."""
    if out.numel() != parts.numel() or out.dtype != parts.dtype or parts.numel() % world_size:
        raise ValueError(
            f"all_to_all: out has {out.numel()} elements of {out.dtype}, parts {parts.numel()} of "
            f"{parts.dtype}: both must have the same dtype and {world_size} equal slices"
        )


def check_subgroup(ranks: Sequence[int], rank: int, world_size: int) -> None:
    """Refuse ``ranks`` that are no subgroup with ``rank`` in it."""
    is_sound = len(set(ranks)) == len(ranks) and all(0 <= r < world_size for r in ranks)
    if not is_sound or rank not in ranks:
        raise ValueError(
            f"subgroup: {list(ranks)} must be different ranks below {world_size}, with rank {rank} "
            "among them: every rank gives the subgroup that it is in"
        )


def _nothing() -> None:
    return None
