"""Assignment of whole parameters to ranks, for optimizers that need whole parameters.

A parameter that lies within one shard is updated where it is. One that lies across the bounds of
shards is *divided*: one of the ranks that hold a part is its owner, gathers it for each step, and
returns the new values. So what travels in a step is the divided parameters, once each way, and
every rank that has a part of a parameter, and no other, needs to know of its update.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from zero_core.layout.arithmetic import Layout


@dataclass(frozen=True)
class Share:
    """A rank's ``[start, stop)`` of a parameter, counted from the parameter's first element."""

    rank: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Whole:
    """A trainable parameter, and who has which part of it."""

    param: int  # its number in the layout
    segment: int  # index of its segment
    owner: int  # the rank that updates it
    shares: tuple[Share, ...]  # its parts by rank, in order. One if it is not divided

    @property
    def numel(self) -> int:
        return self.shares[-1].stop

    @property
    def is_divided(self) -> bool:
        return len(self.shares) > 1


def assign_owners(layout: Layout, *, sliced: Collection[int] = ()) -> tuple[Whole, ...]:
    """Assign the trainable parameters to ranks, in the order of the layout.

    Divided ones are assigned, largest first, to the rank that has the least so far among those with
    a part. The shares are those of stages 1 to 3: at stage 0 every rank has all of each parameter.
    Those ``sliced``, by number, and empty ones have no owner.
    """
    load = [0] * layout.world_size
    found: dict[int, tuple[int, tuple[Share, ...]]] = {}
    divided: list[tuple[int, int]] = []
    owners: dict[int, int] = {}
    for segment in layout.segments:
        for slot in segment.slots if segment.is_trainable else ():
            if slot.start == slot.stop or slot.param in sliced:
                continue
            numel = segment.shard_numel
            shares = tuple(
                Share(rank, *slot.common(rank * numel, (rank + 1) * numel))
                for rank in range(slot.start // numel, (slot.stop - 1) // numel + 1)
            )
            found[slot.param] = segment.index, shares
            if len(shares) > 1:
                divided.append((slot.start - slot.stop, slot.param))
            else:
                owners[slot.param] = shares[0].rank
                load[shares[0].rank] += slot.stop - slot.start
    for minus_numel, param in sorted(divided):
        owner = min((s.rank for s in found[param][1]), key=lambda rank: (load[rank], rank))
        owners[param] = owner
        load[owner] -= minus_numel
    return tuple(Whole(param, index, owners[param], s) for param, (index, s) in found.items())
