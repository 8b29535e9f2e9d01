"""The values of a segment at run time, gathered or not.

See [Note: the tensors of a segment] in `zero_core.unit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from zero_core.arena import BufferPool
from zero_core.collectives import call_named, wait
from zero_core.layout import Segment
from zero_core.protocols import EXACT_PARAMETERS, Collectives, StateTier, Work
from zero_core.resting import Lane, RestingShard

__all__ = ["SegmentValues", "slot_views"]


class SegmentValues:
    """The values of one segment; see [Note: the tensors of a segment] in `zero_core.unit`."""

    def __init__(
        self,
        segment: Segment,
        params: Sequence[nn.Parameter],
        *,
        rank: int,
        device: torch.device,
        shard: Tensor | RestingShard,
        full: Tensor | None,
        pool: BufferPool,
        lane: Lane,
        has_remote_updates: bool,
    ) -> None:
        """Adopt ``params``, one per slot.

        Args:
            segment: the arithmetic.
            params: the model's parameters, in the order of the slots.
            rank: this rank.
            device: where the values are used.
            shard: this rank's slice, on the device or resting off it.
            full: the gathered values if they are kept for good, else None.
            pool: where ``full`` comes from otherwise.
            lane: fills buffers of ``pool``, too.
            has_remote_updates: whether other ranks update slices of it.
        """
        self.segment = segment
        self.params = list(params)
        self.device = device
        self.shard = shard
        self.full = full
        self.version = 0
        """Grows when the values of any rank's shard may have changed."""
        self.local_span: tuple[int, int] | None = None
        """The part of the local flat space whose update these values wait for."""
        self._full_version = 0
        self._has_remote_updates = has_remote_updates
        self.is_kept = full is not None
        """Whether ``full`` is there for good."""
        self._pool = pool
        self.lane = lane
        """What resting shards arrive on."""
        self._rank = rank
        self._gather: Work | None = None
        self._views: dict[int, list[Tensor]] = {}
        self._is_pointed_at = False
        hole = torch.zeros((), dtype=segment.dtype, device=device)
        if segment.dtype.is_floating_point:
            hole.fill_(float("nan"))
        self._num_holders: dict[int, int] = {}
        self.held: dict[int, Tensor] = {}
        """Copies that parameters point at while sharded, by position; see zero_core.gathering."""
        self._placeholders = [hole.expand(p.shape) for p in self.params]

    def start_unshard(
        self,
        collectives: Collectives,
        tier: StateTier | None,
        what: Callable[[], str],
        *,
        backward: bool,
        is_exact: bool = False,
    ) -> None:
        """Start to make ``full`` hold the current values, if it does not.

        A peer that is gone may be noticed here already: a failure says ``what()`` it was.
        ``is_exact``: unquantized. Other gathers are as the collectives do them.
        """
        if self.full is not None and self._full_version == self.version:
            return
        # Of older values, gathered ahead and then not needed.
        self.finish_gather(lambda: f"all_gather of segment {self.segment.index}")
        is_gathered = not self.is_kept or self._has_remote_updates
        if is_gathered and self.full is None:
            self.full = self._pool.acquire(self.segment.padded_numel, self.segment.dtype)
        with self._queue():
            if tier is not None and self.local_span is not None:
                tier.wait_params(*self.local_span)
            if is_gathered:
                version = EXACT_PARAMETERS if is_exact else self.version
                self._gather = self._start_gather(collectives, version, what, backward=backward)
        self._full_version = self.version

    def _queue(self) -> AbstractContextManager[None]:
        """Where the gather is launched; see [Note: the lane] in zero_core.resting."""
        return self.lane if isinstance(self.shard, RestingShard) else nullcontext()

    def _start_gather(
        self, collectives: Collectives, version: int, what: Callable[[], str], *, backward: bool
    ) -> Work:
        full, shard, unit = self.full, self.shard, self.segment.index
        assert full is not None
        if isinstance(shard, RestingShard):
            return shard.gather(full, collectives, what, version=version, backward=backward)
        return call_named(
            lambda: collectives.all_gather(
                full, shard, unit=unit, version=version, backward=backward
            ),
            what,
        )

    def finish_gather(self, what: Callable[[], str]) -> None:
        """Wait for the gather that is under way, if one is."""
        if self._gather is not None:
            work, self._gather = self._gather, None
            wait(work, what)

    def finish_unshard(self, what: Callable[[], str]) -> None:
        """Wait for the gather and let the parameters point at the values."""
        self.finish_gather(what)
        if not self._is_pointed_at:
            for param, view in zip(self.params, self._current_views(), strict=True):
                param.data = view
            self._is_pointed_at = True

    def reshard(self, what: Callable[[], str]) -> None:
        """Give the buffer back, unless the values are kept for good."""
        if self.is_kept or self.full is None:
            return
        self.finish_gather(what)
        self._point_at_placeholders()
        self._pool.release(self.full, self.lane.after_readers())
        self.full = None

    @property
    def is_exchanged(self) -> bool:
        """Whether a gather is an exchange with other ranks."""
        is_gathered = not self.is_kept or self._has_remote_updates
        return is_gathered and self.segment.world_size > 1

    @property
    def is_current(self) -> bool:
        """Whether the parameters hold the current values."""
        return self._is_pointed_at and self._full_version == self.version and self._gather is None

    def settle(self, tier: StateTier | None) -> None:
        """Wait for the tier, where nothing but its update is missing."""
        if self.is_kept and not self._has_remote_updates:
            if tier is not None and self.local_span is not None:
                tier.wait_params(*self.local_span)
            self._full_version = self.version

    def read_shard(self) -> Tensor:
        """This rank's slice of the values, [shard_numel], where it lies; not to be changed."""
        return self.shard.read() if isinstance(self.shard, RestingShard) else self.shard

    def overwrite(self, start: int, values: Tensor) -> None:
        """Take over ``values`` from element ``start`` of the segment on.

        Whoever calls makes sure that nobody gathers, and that ``version`` grows if need be.

        Args:
            start: offset in the segment, in elements.
            values: 1-D, any dtype and device, the same on every rank that stores any of them.
        """
        stop = start + values.numel()
        if self.full is not None:
            self.full[start:stop].copy_(values)
        for position, copy in self.held.items():
            slot = self.segment.slots[position]
            first, last = max(start, slot.start), min(stop, slot.stop)
            if first < last:
                part = copy.view(-1)[first - slot.start : last - slot.start]
                part.copy_(values[first - start : last - start])
        low, high = self.segment.shard_range(self._rank)
        first, last = max(low, start), min(high, stop)
        if first >= last or self.is_kept:  # what is kept holds the shard
            return
        own = values[first - start : last - start]
        if isinstance(self.shard, RestingShard):
            self.shard.write(first - low, own)
        else:
            self.shard[first - low : last - low].copy_(own)

    @property
    def stored(self) -> tuple[int, int]:
        """The part of the segment that this rank stores."""
        if self.is_kept:
            return 0, self.segment.padded_numel
        return self.segment.shard_range(self._rank)

    def published(self) -> Tensor:
        """Where the state tier writes the new values of ``local_span``."""
        if isinstance(self.shard, RestingShard):
            return self.shard.published()
        assert self.local_span is not None
        is_shard = self.local_span[1] - self.local_span[0] == self.shard.numel()
        if is_shard:
            return self.shard
        assert self.full is not None
        return self.full

    def adopt(self) -> None:
        """Let the parameters drop the storage that they came with."""
        for param in self.params:
            param.grad = None  # what an earlier backward left would be added to the first gradient
        if self.is_kept:
            self.finish_unshard(lambda: "")
        else:
            self._point_at_placeholders()

    def abandon(self) -> None:
        """Let the parameters hold nothing, unless it is the current values; nobody gathers more."""
        if not self.is_current:
            self._point_at_placeholders()

    def point(self, position: int) -> None:
        """Let the parameter at ``position`` hold what it should, if its ``data`` was replaced."""
        if self._is_pointed_at:
            tensor = self._current_views()[position]
        else:
            tensor = self.held.get(position, self._placeholders[position])
        found = self.params[position]
        if (found.data_ptr(), found.shape) != (tensor.data_ptr(), tensor.shape):
            found.data = tensor

    def hold(self, position: int, copy: Tensor) -> None:
        """While sharded, let the parameter at ``position`` point at ``copy``, of its values.

        Where it is held already, it points at the copy of then: this is one holder more.
        """
        self._num_holders[position] = self._num_holders.get(position, 0) + 1
        if position in self.held:
            return
        self.held[position] = copy
        if not self._is_pointed_at:
            self.params[position].data = copy

    def let_go(self, position: int) -> None:
        """Forget the copy that `hold` was given, once nobody holds it any more."""
        self._num_holders[position] -= 1
        if self._num_holders[position]:
            return
        del self.held[position]
        if not self._is_pointed_at:
            self.params[position].data = self._placeholders[position]

    def _point_at_placeholders(self) -> None:
        for position, (param, hole) in enumerate(zip(self.params, self._placeholders, strict=True)):
            param.data = self.held.get(position, hole)
        self._is_pointed_at = False

    def _current_views(self) -> list[Tensor]:
        assert self.full is not None
        key = self.full.data_ptr()
        views = self._views.get(key)
        if views is None:
            with torch.inference_mode(False):  # they serve training too
                views = slot_views(self.full, self.segment, self.params)
            self._views[key] = views
        return views


def slot_views(flat: Tensor, segment: Segment, params: Sequence[nn.Parameter]) -> list[Tensor]:
    """Each parameter's part of ``flat`` ([padded_numel]), in its shape."""
    return [
        flat[slot.start : slot.stop].view(param.shape)
        for slot, param in zip(segment.slots, params, strict=True)
    ]
