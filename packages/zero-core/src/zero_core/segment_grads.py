"""The gradients of a segment on their way to the shard, and to the state tier.

See [Note: the tensors of a segment] in `zero_core.unit`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from zero_core.arena import BufferPool
from zero_core.collectives import call_named, wait
from zero_core.layout import Segment
from zero_core.protocols import EXACT_GRADIENTS, Collectives, Work
from zero_core.segment_values import slot_views

__all__ = ["SegmentGrads"]


def _norm(values: Tensor, p: float = 2.0) -> Tensor:
    wide = torch.promote_types(values.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(values, p, dtype=wide)
    return norm


class SegmentGrads:
    """The gradients of one trainable segment.

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
        is_summed: bool,
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
            is_summed: whether the gradient is the ranks' sum, not their mean.
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
        self._predivide = 1.0 if is_summed else 1.0 / segment.world_size
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
        self.is_used = False
        """Whether an update in this step has used the gradient: no more may come."""

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
            self._check_unused()
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

    def _check_unused(self) -> None:
        if self.is_used:
            raise RuntimeError(
                "a gradient came after its unit was updated during backward, as of a block that is "
                "used twice under reentrant activation checkpointing: set zero_optimization."
                "offload_optimizer.update_in_backward to false, and go on from a checkpoint"
            )

    def start_reduce(self, collectives: Collectives, what: Callable[[], str]) -> None:
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
        out, full = self._reduced, self._full_grad
        self._work = call_named(
            lambda: collectives.reduce_scatter(out, full, unit=self.segment.index), what
        )

    def _landing(self) -> Tensor:
        """Where the reduction goes: [shard_numel], accumulation dtype."""
        if self._grad_shard is None:
            if self._lent is not None:  # holds what an earlier backward of the step brought
                return torch.empty_like(self._lent[1])
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
        if self._arrived is not None:
            reduced = self._arrived.add_(reduced)
            self._shard_norm = None
        elif not self._is_shard_empty:
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
        rounded = shard
        if self._final_grad is None or self._offered_dtype is torch.float16:
            rounded = shard.to(self._offered_dtype)
        if self._offered_dtype is torch.float16 and rounded is not shard:
            self._shard_norm = _norm(rounded)  # what overflows here must be seen before it is used
        if self._final_grad is None:
            return rounded
        self._wait_until_read()  # final_grad may be the memory of full_grad
        work = collectives.all_gather(
            self._final_grad,
            shard,
            unit=self.segment.index,
            version=EXACT_GRADIENTS,
            backward=True,
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
        self.is_used = False
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
            self._views[key] = (slot_views(self._full_grad, self.segment, self.params), gaps)
        self._grad_views, self._gap_views = self._views[key]

    def _close(self) -> None:
        self._is_held = False
        full, self._full_grad = self._full_grad, None
        if full is None or full is self._kept_full_grad or full is self._grad_shard:
            return
        until_read, self._until_read = self._until_read, None
        self._pools[full.dtype].release(full, until_read)
