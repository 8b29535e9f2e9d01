"""Flat gradients: those of one segment, from backward to the state tier.

See [Note: the tensors of a segment] in `zero_core.core.unit`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zero_core.comm.communicator import Communicator, NamedReduction, NamedWork
from zero_core.comm.control import ControlGroup
from zero_core.comm.fused_sum import norm_of
from zero_core.comm.topology import Ranks
from zero_core.config import Config
from zero_core.core.gradient_plan import GradientCase, GradientPlan
from zero_core.core.pool import BufferPool, SegmentViews, Wait
from zero_core.layout.arithmetic import Segment
from zero_core.protocols import EXACT_GRADIENTS, StateTier

_STRIDED = torch.strided


@dataclass(frozen=True)
class GradientBuffers:
    """Memory of one segment's gradient, as its plan says.

    Attributes:
        plan: which buffers there are.
        full: ``full_grad`` if it is kept, else None.
        shard: ``grad_shard``; None if the gradient is passed on.
        total: ``grad_sum`` at stage 0 with several ranks, else None.
        full_pools: lend ``full_grad`` otherwise, by dtype.
        shard_pool: lends what is reduced into if there is no ``grad_shard``.
        rounded_pool: lends what the tier is offered where that is rounded.
    """

    plan: GradientPlan
    full: Tensor | None
    shard: Tensor | None
    total: Tensor | None
    full_pools: Mapping[torch.dtype, BufferPool]
    shard_pool: BufferPool
    rounded_pool: BufferPool


@dataclass(frozen=True, slots=True)
class ReducedGrad:
    """The reduced gradient of a segment, for the state tier.

    Attributes:
        shard: what the tier is offered: 1-D, in the offered dtype.
        norm: 2-norm of this rank's shard of the gradient, in fp32 or wider. None if ``shard`` is
            one micro-step's part of the gradient, which the tier adds up. Both may be read after
            `FlatGrads.wait`. If the plan is sequential, the norm of each chunk, 1-D.
    """

    shard: Tensor
    norm: Tensor | None


class FlatGrads:
    """The gradients of one trainable segment.

    Attributes:
        segment: the arithmetic.
        params: the model's parameters, in the order of the slots.
        param_numbers: their numbers in the layout.
        plan: which buffers there are.
        is_passed_on_each: see `GradientPlan`.

    One backward: `add` for each parameter, `reduce`, `finish`. At an accumulation boundary, or in
    every micro-step if the tier adds them up, then `result`, which the state tier is offered, and
    `release`. `clear` starts a new step.
    """

    _missing = 0.0  # the gradient of a parameter without one

    def __init__(
        self,
        segment: Segment,
        params: Sequence[nn.Parameter],
        buffers: GradientBuffers,
        communicator: Communicator,
        tier: StateTier,
        span: tuple[int, int],
        views: SegmentViews,
        arithmetic: Arithmetic,
    ) -> None:
        """Prepare. The state ``tier`` reads back what it was offered, if it owns gradients.

        ``span`` is this rank's part of the local flat space. ``views`` are those of this segment
        and others that are like it.
        """
        self.segment = segment
        self.params = list(params)
        self.plan = buffers.plan
        self.param_numbers = [slot.param for slot in segment.slots]
        self._buffers = buffers
        self._communicator = communicator
        self._tier = tier
        self._span = span
        # The sum is gathered, or the tier copies it.
        self._is_used_at_once = buffers.total is not None or tier.owns_grads
        self._predivide = buffers.plan.predivide
        self._arithmetic = arithmetic
        self.is_passed_on_each = buffers.plan.is_passed_on_each
        self._shard = buffers.shard
        self._padded_numel = segment.padded_numel
        self._has_one_rank = segment.world_size == 1
        self._full: Tensor | None = None
        self._slots: list[Tensor] = []  # views of full, one per parameter
        self._gaps: list[Tensor] = []  # views of what belongs to no parameter
        self._views = views
        self._no_grad = [False] * len(self.params)
        self._has_grad = self._no_grad.copy()
        self._is_wide = False
        self._work: NamedReduction | None = None
        self._target: Tensor | None = None  # of the reduction under way
        # The reduced gradient where there is no grad_shard.
        self._borrowed_grad: Tensor | None = None
        self._lent: tuple[BufferPool, Tensor] | None = None  # the pool buffer behind it
        self._is_replaced = False  # it is the whole step's gradient, set from outside
        self._changed_shard: Tensor | None = None  # what the next reduction is added to
        self._rounded: Tensor | None = None  # what the tier was offered, if it was rounded
        self._is_empty = True  # nothing accumulated since the last step
        self._norm: Tensor | None = None  # of the shard, where it is known already
        # Wait until the other ranks have read full_grad.
        self._until_read: NamedWork | None = None
        self._until_reduced: NamedWork | None = None  # wait until the reduction's sum is there
        self._until_gathered: NamedWork | None = None  # wait until grad_sum is complete
        # Wait until the state tier has copied grad_shard.
        self._until_copied: Wait | None = None
        self._nonfinite: Tensor | None = None  # bool, [world_size]
        self._is_updated = False  # an update in this step has used the gradient

    # ----------------------------------------------------------- one backward

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients were added that no reduction has carried yet."""
        return self._full is not None

    def begin_backward(self) -> None:
        """Begin a backward. A sequential plan has one gradient of each parameter in it."""

    def accumulate_locally(self) -> None:
        """Let gradients of the following backwards add up until the next reduction (``no_sync``).

        They add up in the accumulation dtype. Every rank must call it, those without a gradient
        too: it decides the dtype that is reduced.
        """
        self._is_wide = True

    def add(self, position: int, grad: Tensor) -> None:
        """Add the gradient of parameter ``position`` of the segment to ``full_grad``.

        Raises:
            ValueError: it is sparse.
            RuntimeError: the segment has been updated in this backward already.
        """
        if grad.layout is not _STRIDED:
            raise ValueError(
                "sparse gradients are not supported: use sparse=False in the embedding"
            )
        if self._full is None:
            if self._is_updated:
                raise RuntimeError(
                    "a gradient came after its unit was updated during backward, as of a block "
                    "that is used twice under reentrant activation checkpointing: set "
                    "zero_optimization.offload_optimizer.update_in_backward to false, and go on "
                    "from a checkpoint"
                )
            self._open()
        view = self._slots[position]
        if self._has_grad[position]:
            view.add_(grad, alpha=self._predivide)
        else:
            # Divided in the wider dtype of the two: no bit is lost before it must be.
            same = grad.dtype is view.dtype
            wide = grad.dtype if same else torch.promote_types(grad.dtype, view.dtype)
            if grad.dtype is wide:
                torch.mul(grad, self._predivide, out=view)
            elif view.dtype is wide:
                view.copy_(grad)  # without a wide copy of the gradient besides
                if self._predivide != 1.0:
                    view.mul_(self._predivide)
            else:
                torch.mul(grad.to(wide), self._predivide, out=view)
            self._has_grad[position] = True

    def unreduced(self, position: int) -> Tensor | None:
        """Return this rank's gradient of a parameter that no reduction has carried yet: a copy.

        In the parameter's shape, not divided by the ranks. None if none was added since.
        """
        if self._full is None or not self._has_grad[position]:
            return None
        return self._slots[position] / self._predivide

    def replace_unreduced(self, position: int, grad: Tensor) -> None:
        """Replace what `unreduced` returns.

        Raises:
            RuntimeError: there is none.
        """
        if self._full is None or not self._has_grad[position]:
            raise RuntimeError(
                "the parameter has no gradient on this rank to replace: set it after a backward"
            )
        self._slots[position].copy_(grad).mul_(self._predivide)

    def reduce(self) -> None:
        """Start to reduce what was added. Parameters without a gradient count as zero."""
        if self._full is None:
            self._open()
        full = self._full
        assert full is not None
        if False in self._has_grad:
            for view, has_grad in zip(self._slots, self._has_grad, strict=True):
                if not has_grad:
                    view.fill_(self._missing)
        for gap in self._gaps:
            gap.zero_()
        if self._has_one_rank:  # full_grad is grad_shard: later gradients add to it
            self._has_grad = [True] * len(self.params)
            return
        self._has_grad = self._no_grad.copy()
        if self._is_wide and full.dtype is not self.plan.communicated_sums:
            self._full = self._acquire(self.plan.communicated_sums).copy_(full)
            self._buffers.full_pools[full.dtype].release(full, None)
            full = self._full
        self._target = self._find_target()
        self._work = self._start_reduction(self._target, full)

    def _start_reduction(self, target: Tensor, full: Tensor) -> NamedReduction:
        return self._communicator.reduce_scatter(target, full, self.segment.index)

    def finish(self) -> None:
        """Add the reduction to the step's gradient.

        One that has its statistics is waited for where its sum or its memory is used: `wait`.
        """
        if self._work is not None:
            work, self._work = self._work, None
            reduced, self._target = self._target, None
            assert reduced is not None
            self._take_reduction(work, reduced)
            if self._changed_shard is not None and self._shard is not None:
                # No rank sends its part before it has read the others' shards.
                self._shard.copy_(self._changed_shard)
                self._changed_shard = None
            if self.plan.normed is not None:
                self._norm = None  # another one is wanted
                if self._shard is not None and self.plan.rounded is not reduced.dtype:
                    reduced.copy_(reduced.to(self.plan.rounded))
            if self._shard is None:
                self._set_step_gradient(reduced)
            elif reduced is not self._shard:
                self._shard.add_(reduced)
                self._norm = None
        elif self._shard is None and self._full is not None:
            full, self._full = self._full, None  # one rank: it is the shard
            self._lent = self._buffers.full_pools[full.dtype], full
            self._has_grad = self._no_grad.copy()
            self._set_step_gradient(full)
        self._is_empty = False
        self._close()

    def _find_target(self) -> Tensor:
        """Return what the reduction writes to: [shard_numel], accumulated dtype."""
        shard = self._shard
        if shard is None:
            if self._lent is not None:  # holds what an earlier backward of the step reduced
                return torch.empty_like(self._lent[1])
            pool = self._buffers.shard_pool
            index, numel = self.segment.index, self.segment.shard_numel
            target = pool.acquire(numel, self.plan.accumulated, index)
            self._lent = pool, target
            return target
        if not self._is_empty:
            return torch.empty_like(shard)
        if self._until_copied is not None:
            self._wait_until_copied()
        return shard

    def _set_step_gradient(self, reduced: Tensor) -> None:
        """Make ``reduced`` the step's gradient, with that of earlier backwards, if any."""
        if self._borrowed_grad is not None:
            reduced = self._borrowed_grad.add_(reduced)
            self._norm = None
        elif not self._is_empty and not self.is_passed_on_each:
            reduced = self.values().to(self.plan.accumulated, copy=True).add_(reduced)
            self._norm = None
        self._borrowed_grad = reduced

    # ---------------------------------------------------- the step's gradient

    def result(self) -> ReducedGrad:
        """Return the step's gradient for the state tier, or this micro-step's if the tier adds up.

        At stage 0 that is a collective, and the same on every rank. It runs while backward goes on:
        what is returned may be read after `wait`, unless the tier owns gradients.
        """
        if self.is_passed_on_each:
            assert self._borrowed_grad is not None, "reduced or replaced"
            if self._is_replaced:
                return ReducedGrad(self._borrowed_grad, self.norm())
            return ReducedGrad(self._round(self._borrowed_grad), None)
        shard, total, dtype = self._values(), self._buffers.total, self.plan.offered
        rounded = shard
        if total is None:
            rounded = shard if shard.dtype is dtype else self._round(shard)
        elif dtype is torch.float16:
            rounded = shard.to(dtype)
        if dtype is torch.float16 and rounded is not shard:
            # fp16 may overflow in this cast: take the norm after it.
            self._norm = self._arithmetic.measure(rounded)
        norm = self.norm() if self._norm is None else self._norm
        if total is not None:
            self._wait_until_read()  # total may be the memory of full_grad
            self._until_gathered = self._communicator.all_gather(
                total, shard, self.segment.index, version=EXACT_GRADIENTS, backward=True
            )
            if self._tier.owns_grads:  # it copies what it is offered
                self.wait()
            rounded = self._round(total)
        return ReducedGrad(rounded, norm)

    def changed_result(self) -> ReducedGrad:
        """Return what `result` does, after `take_changes`, without a collective."""
        total = self._buffers.total
        if total is None:
            return self.result()
        return ReducedGrad(self._round(total), self.retake_norm())

    def _round(self, values: Tensor) -> Tensor:
        """Return ``values`` in the offered dtype, in borrowed memory if that is another one."""
        dtype = self.plan.offered
        if values.dtype is dtype:
            return values
        if self._rounded is None:
            pool = self._buffers.rounded_pool
            self._rounded = pool.acquire(values.numel(), dtype, self.segment.index)
        return self._rounded.copy_(values)

    def wait(self) -> None:
        """Wait until the step's gradient, as `result` returned it, is complete."""
        if self._until_reduced is not None:
            until_reduced, self._until_reduced = self._until_reduced, None
            until_reduced.wait()
            if self._until_read is until_reduced:
                self._until_read = None
        if self._until_gathered is not None:
            until_gathered, self._until_gathered = self._until_gathered, None
            until_gathered.wait()

    def synchronize(self) -> None:
        """Wait until nobody reads or writes the gradient's memory, and drop views of the pool's."""
        self.wait()
        self._wait_until_read()
        self._wait_until_copied()
        if self._full is None:
            self._slots, self._gaps = [], []

    def release(self, until_copied: Wait | None) -> None:
        """Free what the state tier was offered.

        ``until_copied`` blocks until the tier has copied it. It is called before the memory is used
        again.
        """
        if self._rounded is not None:  # that alone is what the tier reads
            rounded, self._rounded = self._rounded, None
            self._buffers.rounded_pool.release(rounded, until_copied)
            until_copied = None
        if self._shard is not None:
            self._until_copied = until_copied
        if self._borrowed_grad is not None:
            self._return_lent(until_copied)

    def values(self) -> Tensor:
        """Return this rank's shard of the reduced gradient, [shard_numel]. Not to be written to."""
        self.wait()
        return self._values()

    def _values(self) -> Tensor:
        if self._borrowed_grad is not None:
            return self._borrowed_grad
        if self._shard is not None:
            return self._shard
        return self._tier.read_grad(*self._span).to(self.params[0].device)

    def covered(self) -> Tensor:
        """Return the reduced gradient of all elements that this rank's optimizer state covers."""
        total = self._buffers.total
        if total is None:
            return self.values()
        self.wait()
        return total

    def replace(self, start: int, values: Tensor) -> None:
        self._norm = None
        self._is_replaced = True
        if self._shard is None:
            self._borrowed_grad = self.values().to(self.plan.accumulated, copy=True)
            shard = self._borrowed_grad
        else:
            self._wait_until_copied()
            shard = self._shard
        shard[start : start + values.numel()].copy_(values)

    def of_param(self, position: int) -> Tensor:
        """Return the reduced gradient of parameter ``position``, in its shape.

        A view of what the state tier was offered, or a copy if it owns gradients. Only where its
        state covers the whole segment: at stage 0.
        """
        slot = self.segment.slots[position]
        with torch.inference_mode(False), torch.no_grad():
            return self._views.to_values(position, self.covered()[slot.start : slot.stop])

    @property
    def is_sum_private(self) -> bool:
        """Whether no other rank reads the memory of `covered`."""
        return self._buffers.total is None or self.plan.is_sum_in_full

    def take_changes(self, changes: Mapping[int, Tensor]) -> None:
        """Use what was written to `covered`, and ``changes`` by position of the parameter.

        After all ranks have agreed on the gradient: before, others may read this rank's shard.
        """
        total = self._buffers.total
        for position, grad in changes.items():
            slot, values = self.segment.slots[position], self._views.to_elements(position, grad)
            if total is None:
                self.replace(slot.start, values)
            else:
                self._wait_until_copied()
                total[slot.start : slot.stop].copy_(values)
        if self._shard is not None and total is not None and self.plan.is_sum_in_full:
            low, high = self.segment.shard_range(self._communicator.rank)
            self._shard.copy_(total[low:high])

    def keep_changes(self, changes: Mapping[int, Tensor]) -> None:
        """Have the next reduction added to the gradient with its changes: see `take_changes`.

        With several ranks, any of which may still read this rank's shard.
        """
        low, high = self.segment.shard_range(self._communicator.rank)
        kept = self.covered()[low:high].clone()
        for position, grad in changes.items():
            slot = self.segment.slots[position]
            start, stop = max(slot.start, low), min(slot.stop, high)
            if start < stop:
                values = self._views.to_elements(position, grad)
                kept[start - low : stop - low].copy_(values[start - slot.start : stop - slot.start])
        self._changed_shard = kept

    def covered_norm(self) -> Tensor:
        """Return the 2-norm of `covered` as it is now, as `norm` does, in the offered dtype."""
        values = self.covered()
        if self.plan.offered is torch.float16:  # whose cast may overflow
            values = values.to(torch.float16)
        return self._arithmetic.measure(values, 2.0, self.plan.normed)

    def retake_norm(self) -> Tensor:
        """Return `norm` of the shard after changes."""
        self._norm = None
        return self.norm()

    def norm(self, p: float = 2.0) -> Tensor:
        """Return the ``p``-norm of the shard, in fp32 or wider: see `ReducedGrad`."""
        if p == 2.0 and self._norm is not None:
            return self._norm
        return self._arithmetic.measure(self.values(), p, self.plan.normed)

    def nonfinite_ranks(self) -> list[int] | None:
        """Return the ranks that this rank found to have gradients that are not finite in this step.

        Each such rank of the segment is found by some rank. None if their parts have not been seen:
        the collectives do not show them, this rank's part of the sum is finite, or it was the sum
        over micro-steps that overflowed.
        """
        if self._has_one_rank:
            return [0]
        if self._nonfinite is None:
            return None
        ranks: list[int] = torch.nonzero(self._nonfinite).flatten().tolist()
        return ranks

    def mark_updated(self) -> None:
        """Note that an update has used the gradient: no more may be added in this step."""
        self._is_updated = True

    def clear(self) -> None:
        """Start a new step: nothing accumulated."""
        self._is_empty = True
        self._is_updated = False
        self._has_grad = self._no_grad.copy()
        if self._work is not None and self._work.statistics() is not None:
            self._until_reduced = self._until_read = self._work  # it still reads full_grad
        self._work = self._target = self._norm = self._nonfinite = self._changed_shard = None
        self._is_wide = False
        if self._full is not None:
            self._close()
        self._return_lent(None)

    def _take_reduction(self, work: NamedReduction, reduced: Tensor) -> None:
        """Keep the norm of what ``work`` has ``reduced``, and the ranks that are not finite."""
        statistics = work.statistics()
        if statistics is not None:
            self._until_reduced = self._until_read = work
            if self._is_used_at_once or not self._is_empty:  # or it is added to what is there
                self.wait()
            self._norm = self._arithmetic.of_reduction(statistics.norm)
            self._note_nonfinite(statistics.nonfinite)
            return
        work.wait()
        self._norm = norm = self._arithmetic.measure(reduced)
        # The norm is free to read on a host: finite means no search. On a device reading would
        # synchronize, so look at the contributions instead.
        if not (norm.is_cpu and math.isfinite(norm.sum().item())):
            parts = work.contributions()
            if parts:
                self._note_nonfinite(torch.stack([~torch.isfinite(p).all() for p in parts]))
        self._until_read = work.acknowledge()

    def _note_nonfinite(self, found: Tensor) -> None:
        self._nonfinite = found if self._nonfinite is None else self._nonfinite | found

    def _wait_until_read(self) -> None:
        if self._until_read is not None:
            until_read, self._until_read = self._until_read, None
            until_read.wait()

    def _wait_until_copied(self) -> None:
        if self._until_copied is not None:
            until_copied, self._until_copied = self._until_copied, None
            until_copied()

    def _return_lent(self, until_copied: Wait | None) -> None:
        self._borrowed_grad = None
        self._is_replaced = False
        if self._lent is not None:
            (pool, buffer), self._lent = self._lent, None
            pool.release(buffer, until_copied)

    def _open(self) -> None:
        if self._until_reduced is not None or self._until_gathered is not None:
            self.wait()  # of a step that was dropped, or reduced again
        plan = self.plan
        if plan.case is GradientCase.ALONE:
            self._wait_until_copied()
            full = self._shard
            assert full is not None
        else:
            full = self._acquire(plan.accumulated if self._is_wide else plan.communicated)
        self._full = full
        self._slots, self._gaps, _ = self._views.of(full)

    def _acquire(self, dtype: torch.dtype) -> Tensor:
        """Return memory for ``full_grad`` in ``dtype``: what is kept, or what a pool lends."""
        kept = self._buffers.full
        if kept is not None and kept.dtype == dtype:
            self._wait_until_read()
            return kept
        pool = self._buffers.full_pools[dtype]
        return pool.acquire(self._padded_numel, dtype, self.segment.index)

    def _close(self) -> None:
        self._is_wide = False
        full, self._full = self._full, None
        if full is None or full is self._buffers.full or full is self._shard:
            return
        until_read, self._until_read = self._until_read, None
        readers = None if until_read is None else until_read.wait
        self._buffers.full_pools[full.dtype].release(full, readers)


class Arithmetic:
    """Arithmetic of gradients: sums and norms as in torch and DDP, unless a subclass differs.

    Attributes:
        is_sequential: whether every rank's gradient is a term by itself: see `GradientPlan`.
        num_sums: length of the vector that `add_squares` returns.
        grads_class: adds a segment's gradients.
    """

    is_sequential: bool = False
    num_sums: int = 1
    grads_class: type[FlatGrads] = FlatGrads

    def check(self, config: Config, communicator: Communicator, ranks: Ranks) -> None:
        """Refuse collectives and settings with which it has other bits.

        Raises:
            ConfigError: what they lack.
        """

    def measure(self, values: Tensor, p: float = 2.0, dtype: torch.dtype | None = None) -> Tensor:
        """Return the ``p``-norm of a shard, [shard_numel]: 0-dimensional, or one of each chunk.

        In fp32 or wider; ``dtype`` is that in which the powers are added up, where it is given.
        """
        return norm_of(values, p, dtype)

    def of_reduction(self, norm: Tensor) -> Tensor | None:
        """Return what `measure` does, if the ``norm`` that a reduction took on its way is that."""
        return norm

    def add_squares(self, norms: Sequence[Tensor], squares: Sequence[Tensor]) -> Tensor:
        """Add up a rank's segments: [num_sums], float64. Ranks add such vectors.

        Args:
            norms: by segment, of `measure`.
            squares: of segments of which only these are known, [1] each.
        """
        sums = [*squares]
        if norms:
            sums.append(torch.stack([*norms]).to(torch.float64).square())
        return torch.cat(sums).sum().view(1)

    def finish(self, sums: Tensor) -> None:
        """Replace the first of ``sums``, those of `add_squares`, by the square sum."""

    def over_ranks(self, norms: Sequence[Tensor], p: float, control: ControlGroup) -> float:
        """Return the ``p``-norm of all ranks' shards. Every rank must call it.

        Args:
            norms: by segment, of `measure`: float64, on one device.
        """
        local = torch.linalg.vector_norm(torch.stack([*norms]), p)
        return float(torch.linalg.vector_norm(control.gather(local.view(1)), p))
