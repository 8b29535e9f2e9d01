"""A unit at run time: its values, gathered or not, and its gradients on their way to the shard.

[Note: the tensors of a segment]
shard       [shard_numel], compute dtype, arena: this rank's slice of the values; or it rests off
            the device: see zero_core.resting
full        [padded_numel], compute dtype: the gathered values; at stages 0 to 2 it lies in the
            arena for good and ``shard`` is a view of it; at stage 3 it is a pool buffer while
            unsharded
views       one per parameter, into ``full``, in the parameter's shape: what ``param.data`` is
placeholder one NaN expanded to the parameter's shape: what ``param.data`` is while sharded, so
            that reading a sharded parameter is loud
full_grad   [padded_numel], communication dtype (accumulation dtype if it outlives a backward):
            this rank's own gradients, divided by the world size, until they are reduced
grad_shard  [shard_numel], accumulation dtype, arena: the reduced gradients of the micro-steps
            so far. Where the state tier keeps gradients itself and a step has one micro-step
            there is none: what was reduced (``arrived``) stays in a pool buffer until the tier
            has it
final_grad  what the state tier gets: ``grad_shard`` or ``arrived``; at stage 0 all ranks' of them,
            gathered, of which ``grad_shard`` is a view if ``full_grad`` does not lie there. A tier
            that keeps gradients gets them rounded to the communication dtype
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from zero_core.arena import BufferPool
from zero_core.collectives import call_named, wait
from zero_core.layout import Segment
from zero_core.protocols import Collectives, StateTier, Work
from zero_core.resting import Lane, Outlook, RestingShard

__all__ = ["SegmentGrads", "SegmentValues", "Unit"]


class SegmentValues:
    """The values of one segment; see [Note: the tensors of a segment]."""

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
        self._placeholders = [hole.expand(p.shape) for p in self.params]

    def start_unshard(
        self, collectives: Collectives, tier: StateTier | None, *, backward: bool
    ) -> None:
        """Start to make ``full`` hold the current values, if it does not."""
        if self.full is not None and self._full_version == self.version:
            return
        if self._gather is not None:  # of older values, gathered ahead and then not needed
            work, self._gather = self._gather, None
            wait(work, lambda: f"all_gather of segment {self.segment.index}")
        is_gathered = not self.is_kept or self._has_remote_updates
        if is_gathered and self.full is None:
            self.full = self._pool.acquire(self.segment.padded_numel, self.segment.dtype)
        with self._queue():
            if tier is not None and self.local_span is not None:
                tier.wait_params(*self.local_span)
            if is_gathered:
                self._gather = self._start_gather(collectives, backward=backward)
        self._full_version = self.version

    def _queue(self) -> AbstractContextManager[None]:
        """Where the gather is launched; see [Note: the lane] in zero_core.resting."""
        return self.lane if isinstance(self.shard, RestingShard) else nullcontext()

    def _start_gather(self, collectives: Collectives, *, backward: bool) -> Work:
        assert self.full is not None
        if isinstance(self.shard, RestingShard):
            return self.shard.gather(
                self.full, collectives, version=self.version, backward=backward
            )
        return collectives.all_gather(
            self.full,
            self.shard,
            unit=self.segment.index,
            version=self.version,
            backward=backward,
        )

    def finish_unshard(self, what: Callable[[], str]) -> None:
        """Wait for the gather and let the parameters point at the values."""
        if self._gather is not None:
            work, self._gather = self._gather, None
            wait(work, what)
        if not self._is_pointed_at:
            for param, view in zip(self.params, self._current_views(), strict=True):
                param.data = view
            self._is_pointed_at = True

    def reshard(self, what: Callable[[], str]) -> None:
        """Give the buffer back, unless the values are kept for good."""
        if self.is_kept or self.full is None:
            return
        if self._gather is not None:  # gathered ahead, then not needed
            work, self._gather = self._gather, None
            wait(work, what)
        self._point_at_placeholders()
        self._pool.release(self.full, self.lane.after_readers())
        self.full = None

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

    def _point_at_placeholders(self) -> None:
        for param, placeholder in zip(self.params, self._placeholders, strict=True):
            param.data = placeholder
        self._is_pointed_at = False

    def _current_views(self) -> list[Tensor]:
        assert self.full is not None
        key = self.full.data_ptr()
        views = self._views.get(key)
        if views is None:
            with torch.inference_mode(False):  # they serve training too
                views = _views(self.full, self.segment, self.params)
            self._views[key] = views
        return views


def _views(flat: Tensor, segment: Segment, params: Sequence[nn.Parameter]) -> list[Tensor]:
    return [
        flat[slot.start : slot.stop].view(param.shape)
        for slot, param in zip(segment.slots, params, strict=True)
    ]


def _norm(values: Tensor, p: float = 2.0) -> Tensor:
    wide = torch.promote_types(values.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(values, p, dtype=wide)
    return norm


class SegmentGrads:
    """The gradients of one trainable segment; see [Note: the tensors of a segment].

    One backward: `take` for each parameter, `start_reduce`, `finish_reduce`; at an accumulation
    boundary then `finalize`, and `offered` when the state tier was given what that returned.
    """

    def __init__(
        self,
        segment: Segment,
        params: Sequence[nn.Parameter],
        *,
        grad_shard: Tensor | None,
        kept_full_grad: Tensor | None,
        final_grad: Tensor | None,
        pools: Mapping[torch.dtype, BufferPool],
        shard_pool: BufferPool,
        communication_dtype: torch.dtype,
        accumulation_dtype: torch.dtype,
        offered_dtype: torch.dtype,
        read_offered: Callable[[], Tensor] | None,
    ) -> None:
        """Prepare for the gradients of ``params``.

        Args:
            segment: the arithmetic.
            params: the model's parameters, in the order of the slots.
            grad_shard: accumulates the reduced gradients; None if nothing is kept for that.
            kept_full_grad: ``full_grad`` where it is kept for good (stages 0 and 1), else None.
            final_grad: [padded_numel], accumulation dtype, where every rank updates the whole
                segment (stage 0 with several ranks), else None: ``grad_shard`` is final.
            pools: where ``full_grad`` comes from otherwise, by its dtype.
            shard_pool: where a reduction goes to if there is no ``grad_shard``.
            communication_dtype: what gradients are reduced in.
            accumulation_dtype: what reduced gradients add up in.
            offered_dtype: what the state tier is given.
            read_offered: reads this rank's shard back from the tier, if there is no ``grad_shard``.
        """
        self.segment = segment
        self.params = list(params)
        self._read_offered = read_offered
        self._grad_shard = grad_shard
        self._kept_full_grad = kept_full_grad
        self._final_grad = final_grad
        self._pools = pools
        self._shard_pool = shard_pool
        self._communication_dtype = communication_dtype
        self._accumulation_dtype = accumulation_dtype
        self._offered_dtype = offered_dtype
        self._predivide = 1.0 / segment.world_size
        self._full_grad: Tensor | None = None
        self._grad_views: list[Tensor] = []  # of the parameters, into full_grad
        self._gap_views: list[Tensor] = []  # of what belongs to no parameter
        self._views: dict[tuple[int, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        self._has_grad = [False] * len(self.params)
        self._is_held = False
        self._reduced: Tensor | None = None
        self._arrived: Tensor | None = None
        self._lent: tuple[BufferPool, Tensor] | None = None  # the pool buffer behind arrived
        self._work: Work | None = None
        self._is_shard_empty = True  # nothing accumulated since the last step
        self._shard_norm: Tensor | None = None  # its 2-norm, where it is known already
        self._until_read: Callable[[], None] | None = None  # by the other ranks, of full_grad
        self._until_copied: Callable[[], None] | None = None  # by the state tier, of grad_shard
        self._spoilt_by: Tensor | None = None  # bool, [world_size]

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients were taken that no reduction has carried yet."""
        return self._full_grad is not None

    def hold(self) -> None:
        """What is taken before the next reduction adds up over several backwards (``no_sync``).

        Every rank must call it, those without a gradient too: it decides what is reduced in.
        """
        self._is_held = True

    def take(self, position: int) -> None:
        """Move the gradient of parameter ``position`` of the segment into ``full_grad``."""
        param = self.params[position]
        grad = param.grad
        assert grad is not None
        param.grad = None
        if grad.layout is not torch.strided:
            raise ValueError(
                "sparse gradients are not supported: use sparse=False in the embedding"
            )
        if self._full_grad is None:
            self._open()
        view = self._grad_views[position]
        if self._has_grad[position]:
            view.add_(grad, alpha=self._predivide)
        else:
            if grad.dtype is not view.dtype:
                # Divided in the wider dtype of the two: no bit is lost before it must be.
                grad = grad.to(torch.promote_types(grad.dtype, view.dtype))
            torch.mul(grad, self._predivide, out=view)
            self._has_grad[position] = True

    def start_reduce(self, collectives: Collectives) -> None:
        """Start to reduce what was taken; parameters without a gradient count as zero."""
        if self._full_grad is None:
            self._open()
        assert self._full_grad is not None
        for view, has_grad in zip(self._grad_views, self._has_grad, strict=True):
            if not has_grad:
                view.zero_()
        for gap in self._gap_views:
            gap.zero_()
        if self.segment.world_size == 1:  # full_grad is grad_shard: later gradients add to it
            self._has_grad = [True] * len(self.params)
            return
        self._has_grad = [False] * len(self.params)
        self._reduced = self._landing()
        self._work = collectives.reduce_scatter(
            self._reduced, self._full_grad, unit=self.segment.index
        )

    def _landing(self) -> Tensor:
        """Where the reduction goes: [shard_numel], accumulation dtype."""
        if self._grad_shard is None:
            landing = self._shard_pool.acquire(self.segment.shard_numel, self._accumulation_dtype)
            self._lent = self._shard_pool, landing
            return landing
        if not self._is_shard_empty:
            return torch.empty_like(self._grad_shard)
        self._wait_until_copied()
        return self._grad_shard

    def finish_reduce(self, what: Callable[[], str]) -> None:
        """Wait for the reduction and add it to ``grad_shard``."""
        if self._work is not None:
            work, self._work = self._work, None
            wait(work, what)
            assert self._reduced is not None
            reduced, self._reduced = self._reduced, None
            self._shard_norm = _norm(reduced)
            self._note_spoilers(self._shard_norm, getattr(work, "contributions", ()))
            self._retire(work, what)
            if self._grad_shard is None:
                self._arrive(reduced)
            elif reduced is not self._grad_shard:
                self._grad_shard.add_(reduced)
                self._shard_norm = None
        elif self._grad_shard is None and self._full_grad is not None:
            full, self._full_grad = self._full_grad, None  # one rank: it is the shard
            self._lent = self._pools[full.dtype], full
            self._has_grad = [False] * len(self.params)
            self._arrive(full)
        self._is_shard_empty = False
        self._close()

    def _arrive(self, reduced: Tensor) -> None:
        """``reduced`` is this step's gradient, with that of earlier backwards, if any."""
        if not self._is_shard_empty:
            reduced = self.values().to(self._accumulation_dtype, copy=True).add_(reduced)
            self._shard_norm = None
        self._arrived = reduced

    def _retire(self, work: Work, what: Callable[[], str]) -> None:
        """Tell the others that their gradients are read; ours must stay until they say so."""
        retire: Callable[[], Callable[[], None]] | None = getattr(work, "retire", None)
        if retire is not None:
            wait_until_read = retire()
            self._until_read = lambda: call_named(
                wait_until_read, lambda: f"{what()}: the others' reading of this rank's gradients"
            )

    def _wait_until_read(self) -> None:
        if self._until_read is not None:
            until_read, self._until_read = self._until_read, None
            until_read()

    def _wait_until_copied(self) -> None:
        if self._until_copied is not None:
            until_copied, self._until_copied = self._until_copied, None
            until_copied()

    def values(self) -> Tensor:
        """This rank's shard of the reduced gradient, [shard_numel]; not to be written to."""
        if self._arrived is not None:
            return self._arrived
        if self._grad_shard is not None:
            return self._grad_shard
        assert self._read_offered is not None
        return self._read_offered()

    def covered(self) -> Tensor:
        """The reduced gradient of all that this rank's optimizer state covers."""
        return self.values() if self._final_grad is None else self._final_grad

    def replace(self, start: int, values: Tensor) -> None:
        """Overwrite a part of the shard, from outside; what is known of it is void."""
        self._shard_norm = None
        if self._grad_shard is None:
            self._arrived = self.values().to(self._accumulation_dtype, copy=True)
            shard = self._arrived
        else:
            self._wait_until_copied()
            shard = self._grad_shard
        shard[start : start + values.numel()].copy_(values)

    def norm(self, p: float = 2.0) -> Tensor:
        """``p``-norm of the shard, in fp32 or wider."""
        if p == 2.0 and self._shard_norm is not None:
            return self._shard_norm
        return _norm(self.values(), p)

    def spoilers(self) -> list[int] | None:
        """The ranks whose own gradients made this shard not finite in this step.

        None if their parts have not been seen: the collectives do not show them, or it was the sum
        over micro-steps that overflowed.
        """
        if self.segment.world_size == 1:
            return [0]
        if self._spoilt_by is None:
            return None
        ranks: list[int] = torch.nonzero(self._spoilt_by).flatten().tolist()
        return ranks

    def _note_spoilers(self, norm: Tensor, contributions: Sequence[Tensor]) -> None:
        # On a host the norm is there and tells that all is well, at no cost. Elsewhere reading it
        # would wait for the device, while looking at every contribution there is cheap.
        if not contributions or (norm.is_cpu and math.isfinite(norm.item())):
            return
        found = torch.stack([~torch.isfinite(part).all() for part in contributions])
        self._spoilt_by = found if self._spoilt_by is None else self._spoilt_by | found

    def finalize(self, collectives: Collectives) -> Tensor:
        """The gradient that the state tier gets; see the note."""
        shard = self.values()
        if self._offered_dtype is torch.float16 and shard.dtype is not torch.float16:
            # What overflows here must be seen before it is used.
            self._shard_norm = _norm(shard.to(torch.float16))
        if self._final_grad is None:
            return shard.to(self._offered_dtype)
        self._wait_until_read()  # final_grad may be the memory of full_grad
        work = collectives.all_gather(
            self._final_grad, shard, unit=self.segment.index, version=-1, backward=True
        )
        wait(work, lambda: f"all_gather of the gradient of segment {self.segment.index}")
        return self._final_grad.to(self._offered_dtype)

    def offered(self, until_copied: Callable[[], None] | None) -> None:
        """The state tier has the gradient; its memory is free after ``until_copied``."""
        if self._grad_shard is not None:
            self._until_copied = until_copied
        self._give_back(until_copied)

    def _give_back(self, until_copied: Callable[[], None] | None) -> None:
        self._arrived = None
        if self._lent is not None:
            (pool, buffer), self._lent = self._lent, None
            pool.release(buffer, until_copied)

    def reset(self) -> None:
        """Start a new step: nothing accumulated."""
        self._is_shard_empty = True
        self._has_grad = [False] * len(self.params)
        self._work = self._reduced = self._shard_norm = self._spoilt_by = None
        self._close()
        self._give_back(None)

    def _open(self) -> None:
        dtype = self._accumulation_dtype if self._is_held else self._communication_dtype
        if self.segment.world_size == 1 and self._grad_shard is not None:
            self._wait_until_copied()
            self._full_grad = self._grad_shard
        elif self._kept_full_grad is not None and self._kept_full_grad.dtype == dtype:
            self._wait_until_read()
            self._full_grad = self._kept_full_grad
        else:
            self._full_grad = self._pools[dtype].acquire(self.segment.padded_numel, dtype)
        key = (self._full_grad.data_ptr(), dtype)
        if key not in self._views:
            gaps = [self._full_grad[low:high] for low, high in self.segment.gaps()]
            self._views[key] = (_views(self._full_grad, self.segment, self.params), gaps)
        self._grad_views, self._gap_views = self._views[key]

    def _close(self) -> None:
        self._is_held = False
        full, self._full_grad = self._full_grad, None
        if full is None or full is self._kept_full_grad or full is self._grad_shard:
            return
        until_read, self._until_read = self._until_read, None
        self._pools[full.dtype].release(full, until_read)


class Unit:
    """One unit: its segments' values and gradients, and its name for messages."""

    def __init__(
        self,
        index: int,
        name: str,
        values: Sequence[SegmentValues],
        grads: Sequence[SegmentGrads],
        outlook: Outlook | None = None,
    ) -> None:
        self.index = index
        self.name = name
        self.values = list(values)
        self.grads = list(grads)
        self._outlook = outlook

    def announce_next(self, *, backward: bool) -> None:
        """The unit is in use: let those that follow be read ahead, if they rest off the device."""
        if self._outlook is not None:
            self._outlook.announce(self.index, backward=backward)

    @property
    def num_trainable(self) -> int:
        """Parameters that a backward brings gradients of: those that require one now."""
        return sum(p.requires_grad for g in self.grads for p in g.params)

    @property
    def is_root(self) -> bool:
        """Whether it is what belongs to no block."""
        return self.index == 0

    def is_updated(self, tier: StateTier | None) -> bool:
        """Whether the tier has no update of its values under way."""
        spans = [v.local_span for v in self.values if v.local_span is not None]
        return tier is None or all(tier.are_params_ready(*span) for span in spans)

    @property
    def is_in_use(self) -> bool:
        """Whether its parameters hold the current values."""
        return all(v.is_current for v in self.values)

    def __repr__(self) -> str:
        return f"unit {self.index} ({self.name or 'root'})"
