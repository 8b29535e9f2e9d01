"""The direct exchange: on hosts, every rank hands each other rank just what that one needs.

gloo's own all-gather is a ring of copies and its reduce-scatter a whole all-reduce; a direct
exchange moves the same bytes in about a third of the time (docs/decisions.md). What travels:

[Note: near and far]
A **far** peer gets the bytes themselves, point to point over torch.distributed. A **near** peer,
one that shares memory (`zero_core.shared_memory`), gets a **token**: where the bytes lie. It reads
them there when it waits, so a gather costs one copy and a reduction none. What lies in ordinary
memory (a plug-in's buffers) travels as to a far peer; all ranks use the same kind in the same call.

Near bytes must not change while a peer may still read them. A reduction therefore ends with an
**acknowledgement**, and `Exchange.retire` says how to wait for it. Gathers have none: shards change
only after an exchange in which every rank takes part once it has waited for its gathers (the sum of
the gradient's facts, in a step; see zero_core.protocols).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zero_core.collectives import sum_in_rank_order
from zero_core.errors import CollectiveError
from zero_core.protocols import Work
from zero_core.shared_memory import Place, SharedMemory

__all__ = ["DirectCollectives", "Exchange"]

_GATHER, _REDUCE, _ACKNOWLEDGE = range(1, 4)


def _tag(kind: int, unit: int) -> int:
    # Ranks that gather different units must not take one for the other.
    return 4 * unit + kind


class DirectCollectives:
    """`zero_core.protocols.Collectives` among hosts; see there for the contract."""

    has_retire = True
    """Works of reductions have ``retire``."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        rank: int,
        world_size: int,
        shared: SharedMemory | None = None,
    ) -> None:
        """``group`` None means the default group, or none at all if ``world_size`` is 1."""
        self._group = group
        self._rank = rank
        self._world_size = world_size
        self._shared = shared
        # Each rank starts with its right neighbour, so that no rank is everybody's first target.
        self._peers = [(rank + k) % world_size for k in range(1, world_size)]
        self._near = frozenset[int]() if shared is None else shared.peers
        self._has_far = len(self._near) < len(self._peers)
        self._tokens: dict[tuple[int, int, int], Tensor] = {}
        self._scratch: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._nod = torch.zeros(1, dtype=torch.uint8)

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> Work:
        """See `zero_core.protocols.Collectives.all_gather`."""
        slices = out.view(self._world_size, -1)
        own = slices[self._rank]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        place = self._place(shard)
        tag = _tag(_GATHER, unit)
        parcels = [self._trade(shard, place, slices[peer], peer, tag) for peer in self._peers]

        def finish() -> None:
            for peer, parcel in zip(self._peers, parcels, strict=True):
                arrived = parcel()
                if arrived.data_ptr() != slices[peer].data_ptr():
                    slices[peer].copy_(arrived)

        return Exchange(finish)

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        """See `zero_core.protocols.Collectives.reduce_scatter`."""
        slices = full.view(self._world_size, -1)
        is_near = self._place(full) is not None
        received = None if is_near and not self._has_far else self._borrow(full)
        parts = slices if received is None else received.view(self._world_size, -1)
        tag = _tag(_REDUCE, unit)
        parcels = {
            peer: self._trade(slices[peer], self._place(slices[peer]), parts[peer], peer, tag)
            for peer in self._peers
        }
        sources = list(slices)

        def finish() -> None:
            for peer, parcel in parcels.items():
                sources[peer] = parcel()
            sum_in_rank_order(out, sources)

        def retire() -> Callable[[], None]:
            if received is not None:
                self._scratch[received.numel(), received.dtype].append(received)
            return self._acknowledge(unit) if is_near else _nothing

        return Exchange(finish, sources, retire)

    def _place(self, tensor: Tensor) -> Place | None:
        return None if self._shared is None else self._shared.locate(tensor)

    def _borrow(self, like: Tensor) -> Tensor:
        free = self._scratch.setdefault((like.numel(), like.dtype), [])
        return free.pop() if free else torch.empty_like(like)

    def _trade(
        self, given: Tensor, place: Place | None, into: Tensor, peer: int, tag: int
    ) -> Callable[[], Tensor]:
        """Give and take with one peer; what returns the other's bytes once they are there.

        ``given`` and ``into`` have the same number of elements and dtype. Far bytes arrive in
        ``into``; near ones stay where they are.
        """
        if self._shared is None or place is None or peer not in self._near:
            works = [self._receive(into, peer, tag), self._send(given, peer, tag)]
            return partial(_arrived, works, into)
        mine = self._tokens.get((*place, given.nbytes))
        if mine is None:
            mine = self._tokens[*place, given.nbytes] = torch.tensor((*place, given.nbytes))
        theirs = torch.empty(3, dtype=torch.int64)
        works = [self._receive(theirs, peer, tag), self._send(mine, peer, tag)]
        return partial(self._look, works, theirs, peer, into.numel(), into.dtype)

    def _look(
        self, works: Sequence[Work], token: Tensor, peer: int, numel: int, dtype: torch.dtype
    ) -> Tensor:
        assert self._shared is not None
        descriptor, offset, nbytes = _arrived(works, token).tolist()
        if nbytes != numel * dtype.itemsize:
            raise CollectiveError(
                f"rank {self._rank} expects {numel * dtype.itemsize} bytes of rank {peer}, which "
                f"has {nbytes}: the ranks exchange different dtypes or units"
            )
        return self._shared.at(peer, (descriptor, offset), numel, dtype)

    def _acknowledge(self, unit: int) -> Callable[[], None]:
        """Tell the near peers that their bytes were read; what waits until they say the same."""
        tag = _tag(_ACKNOWLEDGE, unit)
        near = [peer for peer in self._peers if peer in self._near]
        nods = torch.empty(len(near), dtype=torch.uint8)
        works = [self._receive(nods[i : i + 1], peer, tag) for i, peer in enumerate(near)]
        works += [self._send(self._nod, peer, tag) for peer in near]

        def wait() -> None:
            _arrived(works, nods)

        return wait

    def _send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        work = dist.isend(tensor, group=self._group, group_dst=peer, tag=tag)
        assert work is not None
        return work

    def _receive(self, tensor: Tensor, peer: int, tag: int) -> Work:
        work = dist.irecv(tensor, group=self._group, group_src=peer, tag=tag)
        assert work is not None
        return work


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


def _arrived(works: Sequence[Work], tensor: Tensor) -> Tensor:
    for work in works:
        work.wait()
    return tensor


def _nothing() -> None:
    return None
