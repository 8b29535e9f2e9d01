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
from zero_core.comm.groups import Ranks
from zero_core.config import Config
from zero_core.core.pool import BufferPool, SegmentViews, Wait
from zero_core.layout.arithmetic import Segment
from zero_core.layout.gradient_plan import GradientCase, GradientPlan
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


class FullGrad:
    """This rank's own gradient of a segment: ``full_grad``, from backward to its reduction.

    Attributes:
        memory: [padded_numel], what was added since the last reduction; None if nothing was.
        until_read: wait until the other ranks have read it.
    """

    def __init__(
        self, segment: Segment, buffers: GradientBuffers, views: SegmentViews, missing: float
    ) -> None:
        """Prepare. ``missing`` is the gradient of a parameter without one."""
        self.memory: Tensor | None = None
        self.until_read: NamedWork | None = None
        plan = buffers.plan
        self._segment = segment
        self._plan = plan
        # One rank has nothing to reduce: its gradients add up where the step's gradient is.
        self._is_shard = plan.case is GradientCase.ALONE
        self._kept = buffers.shard if self._is_shard else buffers.full
        self._pools = buffers.full_pools
        self._views = views
        self._predivide = plan.predivide
        self._missing = missing
        self._slots: list[Tensor] = []  # views of the memory, one per parameter
        self._gaps: list[Tensor] = []  # views of what belongs to no parameter
        self._no_grad = [False] * len(segment.slots)
        self._has_grad = self._no_grad.copy()
        self._is_wide = False

    def accumulate_locally(self) -> None:
        """Let gradients of the following backwards add up until the next reduction (``no_sync``).

        They add up in the accumulation dtype. Every rank must call it, those without a gradient
        too: it decides the dtype that is reduced.
        """
        self._is_wide = True

    def open(self, dtype: torch.dtype | None = None) -> Tensor:
        """Take memory, in the ``dtype`` in which gradients are added unless it is given."""
        if dtype is None:
            is_accumulated = self._is_wide or self._is_shard
            dtype = self._plan.accumulated if is_accumulated else self._plan.communicated
        if self._kept is not None and self._kept.dtype == dtype:
            self.wait_until_read()
            self.memory = self._kept
        else:
            numel, user = self._segment.padded_numel, self._segment.index
            self.memory = self._pools[dtype].acquire(numel, dtype, user)
        self._slots, self._gaps, _ = self._views.of(self.memory)
        return self.memory

    def add(self, position: int, grad: Tensor) -> None:
        """Add the gradient of parameter ``position`` of the segment."""
        view = self._slots[position]
        if self._has_grad[position]:
            view.add_(grad, alpha=self._predivide)
            return
        self._has_grad[position] = True
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

    def unreduced(self, position: int) -> Tensor | None:
        """Return this rank's gradient of a parameter that no reduction has carried yet: a copy.

        In the parameter's shape, not divided by the ranks. None if none was added since.
        """
        if self.memory is None or not self._has_grad[position]:
            return None
        return self._slots[position] / self._predivide

    def replace_unreduced(self, position: int, grad: Tensor) -> None:
        """Replace what `unreduced` returns.

        Raises:
            RuntimeError: there is none.
        """
        if self.memory is None or not self._has_grad[position]:
            raise RuntimeError(
                "the parameter has no gradient on this rank to replace: set it after a backward"
            )
        self._slots[position].copy_(grad).mul_(self._predivide)

    def complete(self) -> Tensor:
        """Return the memory as it is reduced. Parameters without a gradient count as zero."""
        full = self.memory
        assert full is not None, "it is open"
        if False in self._has_grad:
            for view, has_grad in zip(self._slots, self._has_grad, strict=True):
                if not has_grad:
                    view.fill_(self._missing)
        for gap in self._gaps:
            gap.zero_()
        if self._segment.world_size == 1:  # later gradients add to these
            self._has_grad = [True] * len(self._has_grad)
            return full
        self._has_grad = self._no_grad.copy()
        dtype = self._plan.communicated_sums
        if self._is_wide and full.dtype is not dtype:
            wide, full = full, self.open(dtype).copy_(full)
            self._pools[wide.dtype].release(wide, None)
        return full

    def pass_on(self) -> tuple[BufferPool, Tensor]:
        """Give up the only rank's gradient. Return the pool that it belongs to, and its memory."""
        full, self.memory = self.memory, None
        assert full is not None, "it is open"
        self._has_grad = self._no_grad.copy()
        return self._pools[full.dtype], full

    def close(self) -> None:
        """Give up the memory, once other ranks have read it."""
        self._is_wide = False
        full, self.memory = self.memory, None
        if full is None or full is self._kept:
            return
        until_read, self.until_read = self.until_read, None
        readers = None if until_read is None else until_read.wait
        self._pools[full.dtype].release(full, readers)

    def clear(self) -> None:
        """Drop what was added."""
        self._has_grad = self._no_grad.copy()
        self._is_wide = False
        if self.memory is not None:
            self.close()

    def wait_until_read(self) -> None:
        if self.until_read is not None:
            until_read, self.until_read = self.until_read, None
            until_read.wait()

    def forget_views(self) -> None:
        """Drop views of the pool's memory, where nothing is kept in it."""
        if self.memory is None:
            self._slots, self._gaps = [], []


class GradShard:
    """``grad_shard``: this rank's reduced gradient of the micro-steps so far.

    Attributes:
        is_empty: whether nothing was added since the last step.
        is_used_at_once: whether `offer` uses the sum.
        is_private: whether no other rank reads the memory of `covered`.
        is_part: whether it is one micro-step's part of the gradient, which the tier adds up.
        until_gathered: wait until what `offer` has returned is complete; None if it is.
    """

    is_private = True
    is_part = False

    def __init__(self, segment: Segment, buffers: GradientBuffers, tier: StateTier) -> None:
        self.is_empty = True
        self.is_used_at_once = tier.owns_grads  # it copies what it is offered
        self._segment = segment
        self._plan = buffers.plan
        self._shard = buffers.shard
        self.until_gathered: NamedWork | None = None
        self._until_copied: Wait | None = None  # by the state tier
        self._rounded_pool = buffers.rounded_pool
        self._rounded: Tensor | None = None  # what the tier was offered, if it was rounded

    def target(self) -> Tensor:
        """Return what a reduction writes to: [shard_numel], accumulated dtype.

        A sequential plan's reduction adds to it.
        """
        shard = self._shard
        assert shard is not None, "the case has one"
        if not (self.is_empty or self._plan.is_sequential):
            return torch.empty_like(shard)
        if self._until_copied is not None:
            self.wait_until_copied()
        return shard

    def add(self, reduced: Tensor) -> bool:
        """Add what was ``reduced`` to `target`. Return whether it alone is the gradient now."""
        self.is_empty = False
        if reduced is self._shard:
            return True
        self.values().add_(reduced)
        return False

    def add_own(self, full: FullGrad) -> bool:
        """Add the gradient of the only rank: see `add`. Its memory is the shard."""
        self.is_empty = False
        return True

    def values(self) -> Tensor:
        """Return the shard of the gradient, [shard_numel]. Not to be written to."""
        assert self._shard is not None, "the case has one"
        return self._shard

    def covered(self) -> Tensor:
        """Return the gradient of all elements that this rank's optimizer state covers."""
        return self.values()

    def replace(self, start: int, values: Tensor) -> None:
        """Replace elements of the shard, from its element ``start`` on."""
        self.wait_until_copied()
        self.values()[start : start + values.numel()].copy_(values)

    def change(self, changes: Sequence[tuple[int, Tensor]]) -> None:
        """Replace elements of `covered`, each from a start on."""
        for start, values in changes:
            self.replace(start, values)

    def rounded(self) -> Tensor:
        """Return the shard in the offered dtype, as its norm is taken."""
        shard = self.values()
        return shard if shard.dtype is self._plan.offered else self._round(shard)

    def offer(self, rounded: Tensor) -> Tensor:
        """Return what the state tier is offered, of what `rounded` has returned."""
        return rounded

    def _round(self, values: Tensor) -> Tensor:
        """Return ``values`` in the offered dtype, in borrowed memory if that is another one."""
        dtype = self._plan.offered
        if values.dtype is dtype:
            return values
        if self._rounded is None:
            user = self._segment.index
            self._rounded = self._rounded_pool.acquire(values.numel(), dtype, user)
        return self._rounded.copy_(values)

    def release(self, until_copied: Wait | None) -> None:
        """Free what the state tier was offered.

        ``until_copied`` blocks until the tier has copied it. It is called before the memory is used
        again.
        """
        if self._rounded is not None:  # that alone is what the tier reads
            rounded, self._rounded = self._rounded, None
            self._rounded_pool.release(rounded, until_copied)
            until_copied = None
        self._until_copied = until_copied

    def wait_until_copied(self) -> None:
        if self._until_copied is not None:
            until_copied, self._until_copied = self._until_copied, None
            until_copied()

    def clear(self) -> None:
        self.is_empty = True


class SummedShard(GradShard):
    """``grad_shard`` and ``grad_sum``, the shards of all ranks: stage 0.

    Attributes:
        total: ``grad_sum``.
    """

    def __init__(
        self,
        segment: Segment,
        buffers: GradientBuffers,
        tier: StateTier,
        full: FullGrad,
        communicator: Communicator,
    ) -> None:
        super().__init__(segment, buffers, tier)
        assert buffers.total is not None, "the case has one"
        self.total = buffers.total
        self.is_used_at_once = True
        self.is_private = self._plan.is_sum_in_full
        self._owns_grads = tier.owns_grads
        self._full = full
        self._communicator = communicator
        self._range = segment.shard_range(communicator.rank)
        self._changed: Tensor | None = None  # what the next reduction is added to

    def add(self, reduced: Tensor) -> bool:
        if self._changed is not None:
            # No rank sends its part before it has read the others' shards.
            self.values().copy_(self._changed)
            self._changed = None
        if self._plan.normed is not None and self._plan.rounded is not reduced.dtype:
            reduced.copy_(reduced.to(self._plan.rounded))
        return super().add(reduced)

    def covered(self) -> Tensor:
        return self.total

    def rounded(self) -> Tensor:
        shard, dtype = self.values(), self._plan.offered
        return shard.to(dtype) if dtype is torch.float16 else shard

    def offer(self, rounded: Tensor) -> Tensor:
        self._full.wait_until_read()  # the sum may be in its memory
        gathered = self._communicator.all_gather(
            self.total, self.values(), self._segment.index, version=EXACT_GRADIENTS, backward=True
        )
        if self._owns_grads:  # the tier copies what it is offered
            gathered.wait()
        else:
            self.until_gathered = gathered
        return self._round(self.total)

    def offer_changed(self) -> Tensor:
        """Return what the state tier is offered after `change`, without a collective."""
        return self._round(self.total)

    def change(self, changes: Sequence[tuple[int, Tensor]]) -> None:
        """Replace elements of the sum, and have the shard follow what was written to it.

        After all ranks have agreed on the gradient: before, others may read this rank's shard.
        """
        for start, values in changes:
            self.wait_until_copied()
            self.total[start : start + values.numel()].copy_(values)
        if self._plan.is_sum_in_full:  # else the shard is a view of it
            self.values().copy_(self.total[slice(*self._range)])

    def keep(self, changes: Sequence[tuple[int, Tensor]]) -> None:
        """Have the next reduction added to the sum with ``changes``: see `change`.

        Any other rank may still read this rank's shard.
        """
        low, high = self._range
        kept = self.total[low:high].clone()
        for at, values in changes:
            start, stop = max(at, low), min(at + values.numel(), high)
            if start < stop:
                kept[start - low : stop - low].copy_(values[start - at : stop - at])
        self._changed = kept

    def clear(self) -> None:
        super().clear()
        self._changed = None


class PassedOnShard(GradShard):
    """A step's reduced gradient in borrowed memory, until the state tier has copied it."""

    def __init__(
        self,
        segment: Segment,
        buffers: GradientBuffers,
        tier: StateTier,
        span: tuple[int, int],
        device: torch.device,
    ) -> None:
        super().__init__(segment, buffers, tier)
        self._tier = tier
        self._span = span
        self._device = device
        self._pool = buffers.shard_pool
        self._lent: tuple[BufferPool, Tensor] | None = None  # the pool buffer behind the shard

    def target(self) -> Tensor:
        if self._lent is not None:  # holds what an earlier backward of the step reduced
            return torch.empty_like(self._lent[1])
        numel, user = self._segment.shard_numel, self._segment.index
        target = self._pool.acquire(numel, self._plan.accumulated, user)
        self._lent = self._pool, target
        return target

    def add_own(self, full: FullGrad) -> bool:
        if full.memory is None:  # Ctrl-C came between here and the end of `FlatGrads.finish`
            return True
        self._lent = full.pass_on()
        return self.add(self._lent[1])

    def add(self, reduced: Tensor) -> bool:
        is_first, self.is_empty = self.is_empty, False
        if self._shard is not None:
            self._shard.add_(reduced)
            return False
        if is_first:
            self._shard = reduced
        else:
            self._shard = self.values().to(self._plan.accumulated, copy=True).add_(reduced)
        return is_first

    def values(self) -> Tensor:
        if self._shard is not None:
            return self._shard
        return self._tier.read_grad(*self._span).to(self._device)

    def replace(self, start: int, values: Tensor) -> None:
        self._shard = self.values().to(self._plan.accumulated, copy=True)
        super().replace(start, values)

    def release(self, until_copied: Wait | None) -> None:
        super().release(until_copied)
        self._return_memory()

    def _return_memory(self) -> None:
        self._shard = None
        until_copied, self._until_copied = self._until_copied, None
        if self._lent is not None:
            (pool, buffer), self._lent = self._lent, None
            pool.release(buffer, until_copied)

    def clear(self) -> None:
        super().clear()
        self._return_memory()


class PassedOnPart(PassedOnShard):
    """One micro-step's reduced gradient, which the state tier adds to those before.

    Unless it was replaced: then it is the whole step's gradient, as it was set.
    """

    is_part = True

    def add(self, reduced: Tensor) -> bool:
        self.is_empty = False
        is_first = self._shard is None
        self._shard = reduced if self._shard is None else self._shard.add_(reduced)
        return is_first

    def rounded(self) -> Tensor:
        return super().rounded() if self.is_part else self.values()

    def replace(self, start: int, values: Tensor) -> None:
        super().replace(start, values)
        self.is_part = False

    def _return_memory(self) -> None:
        super()._return_memory()
        self.is_part = True


class FlatGrads:
    """The gradients of one trainable segment.

    Attributes:
        segment: the arithmetic.
        params: the model's parameters, in the order of the slots.
        param_numbers: their numbers in the layout.
        plan: which buffers there are.
        full: this rank's own gradient.
        shard: what has been reduced of it.
        is_updated: whether an update has used it: no more may be added in this step.

    One backward: `add` for each parameter, `reduce`, `finish`. At an accumulation boundary, or in
    every micro-step if the tier adds them up, then `result`, which the state tier is offered, and
    `GradShard.release`. `clear` starts a new step.
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
        self.plan = plan = buffers.plan
        self.param_numbers = [slot.param for slot in segment.slots]
        self.full = FullGrad(segment, buffers, views, self._missing)
        self.shard: GradShard
        if plan.case is GradientCase.WHOLE_SUM:
            self.shard = SummedShard(segment, buffers, tier, self.full, communicator)
        elif plan.is_shard_kept:
            self.shard = GradShard(segment, buffers, tier)
        else:
            passed_on = PassedOnPart if plan.is_passed_on_each else PassedOnShard
            self.shard = passed_on(segment, buffers, tier, span, views.placeholders.slots[0].device)
        self._communicator = communicator
        self._arithmetic = arithmetic
        self._views = views
        self._work: NamedReduction | None = None
        self._target: Tensor | None = None  # of the reduction under way
        self._norm: Tensor | None = None  # of the shard, where it is known already
        self._until_reduced: NamedWork | None = None  # wait until the reduction's sum is there
        self._nonfinite: Tensor | None = None  # bool, [world_size]
        self.is_updated = False

    # ----------------------------------------------------------- one backward

    def begin_backward(self) -> None:
        """Begin a backward. A sequential plan has one gradient of each parameter in it."""

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
        if self.full.memory is None:
            if self.is_updated:
                raise RuntimeError(
                    "a gradient came after its unit was updated during backward, as of a block "
                    "that is used twice under reentrant activation checkpointing: set "
                    "zero_optimization.offload_optimizer.update_in_backward to false, and go on "
                    "from a checkpoint"
                )
            self._open()
        self.full.add(position, grad)

    def _open(self) -> None:
        if self._until_reduced is not None or self.shard.until_gathered is not None:
            self.wait()  # of a step that was dropped, or reduced again
        if self.plan.case is GradientCase.ALONE:  # full_grad is grad_shard
            self.shard.wait_until_copied()
        self.full.open()

    def reduce(self) -> None:
        """Start to reduce what was added. Parameters without a gradient count as zero."""
        if self.full.memory is None:
            self._open()
        full = self.full.complete()
        if self.segment.world_size > 1:
            self._target = self.shard.target()
            self._work = self._start_reduction(self._target, full)

    def _start_reduction(self, target: Tensor, full: Tensor) -> NamedReduction:
        return self._communicator.reduce_scatter(target, full, self.segment.index)

    def finish(self) -> None:
        """Add the reduction to the step's gradient.

        One that has its statistics is waited for where its sum or its memory is used: `wait`.
        """
        work, self._work = self._work, None
        if work is None:
            is_sum = not self.shard.add_own(self.full)
        else:
            reduced, self._target = self._target, None
            assert reduced is not None, "of the reduction"
            self._take_reduction(work, reduced)
            is_sum = not self.shard.add(reduced) or self.plan.normed is not None
        if is_sum:
            self._norm = None  # what is known is another one
        self.full.close()

    def _take_reduction(self, work: NamedReduction, reduced: Tensor) -> None:
        """Keep the norm of what ``work`` has ``reduced``, and the ranks that are not finite."""
        statistics = work.statistics()
        if statistics is not None:
            self._until_reduced = self.full.until_read = work
            if self.shard.is_used_at_once or not self.shard.is_empty:  # added to what is there
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
        self.full.until_read = work.acknowledge()

    def _note_nonfinite(self, found: Tensor) -> None:
        self._nonfinite = found if self._nonfinite is None else self._nonfinite | found

    # ---------------------------------------------------- the step's gradient

    def result(self) -> ReducedGrad:
        """Return the step's gradient for the state tier, or this micro-step's if the tier adds up.

        At stage 0 that is a collective, and the same on every rank. It runs while backward goes on:
        what is returned may be read after `wait`, unless the tier owns gradients.
        """
        rounded = self.shard.rounded()
        if self.shard.is_part:
            return ReducedGrad(rounded, None)
        if rounded.dtype is torch.float16 and self.plan.accumulated is not torch.float16:
            # fp16 may overflow in this cast: take the norm after it.
            self._norm = self._arithmetic.measure(rounded)
        norm = self.norm() if self._norm is None else self._norm
        return ReducedGrad(self.shard.offer(rounded), norm)

    def changed_result(self) -> ReducedGrad:
        """Return what `result` does, after `take_changes`, without a collective."""
        if not isinstance(self.shard, SummedShard):
            return self.result()
        return ReducedGrad(self.shard.offer_changed(), self.retake_norm())

    def wait(self) -> None:
        """Wait until the step's gradient, as `result` returned it, is complete."""
        if self._until_reduced is not None:
            until_reduced, self._until_reduced = self._until_reduced, None
            until_reduced.wait()
            if self.full.until_read is until_reduced:
                self.full.until_read = None
        if self.shard.until_gathered is not None:
            until_gathered, self.shard.until_gathered = self.shard.until_gathered, None
            until_gathered.wait()

    def synchronize(self) -> None:
        """Wait until nobody reads or writes the gradient's memory, and drop views of the pool's."""
        self.wait()
        self.full.wait_until_read()
        self.shard.wait_until_copied()
        self.full.forget_views()

    def values(self) -> Tensor:
        """Return this rank's shard of the reduced gradient, [shard_numel]. Not to be written to."""
        self.wait()
        return self.shard.values()

    def covered(self) -> Tensor:
        """Return the reduced gradient of all elements that this rank's optimizer state covers."""
        self.wait()
        return self.shard.covered()

    def replace(self, start: int, values: Tensor) -> None:
        """Replace elements of `values`, from its element ``start`` on."""
        self.wait()
        self._norm = None
        self.shard.replace(start, values)

    def of_param(self, position: int) -> Tensor:
        """Return the reduced gradient of parameter ``position``, in its shape.

        A view of what the state tier was offered, or a copy if it owns gradients. Only where its
        state covers the whole segment: at stage 0.
        """
        slot = self.segment.slots[position]
        with torch.inference_mode(False), torch.no_grad():
            return self._views.to_values(position, self.covered()[slot.start : slot.stop])

    def take_changes(self, changes: Mapping[int, Tensor]) -> None:
        """Use what was written to `covered`, and ``changes`` by position of the parameter.

        After all ranks have agreed on the gradient: before, others may read this rank's shard.
        """
        self.wait()
        if changes:
            self._norm = None
        self.shard.change(self._elements(changes))

    def keep_changes(self, changes: Mapping[int, Tensor]) -> None:
        """Have the next reduction added to the gradient with its changes: see `take_changes`.

        With several ranks, any of which may still read this rank's shard.
        """
        self.wait()
        assert isinstance(self.shard, SummedShard), "changes are made at stage 0"
        self.shard.keep(self._elements(changes))

    def _elements(self, changes: Mapping[int, Tensor]) -> list[tuple[int, Tensor]]:
        """Return ``changes`` by position as elements of the segment, each from a start on."""
        slots, to_elements = self.segment.slots, self._views.to_elements
        return [(slots[at].start, to_elements(at, grad)) for at, grad in changes.items()]

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
        if self.segment.world_size == 1:
            return [0]
        if self._nonfinite is None:
            return None
        ranks: list[int] = torch.nonzero(self._nonfinite).flatten().tolist()
        return ranks

    def clear(self) -> None:
        """Start a new step: nothing accumulated."""
        self.is_updated = False
        if self._work is not None and self._work.statistics() is not None:
            self._until_reduced = self.full.until_read = self._work  # it still reads full_grad
        self._work = self._target = self._norm = self._nonfinite = None
        self.full.clear()
        self.shard.clear()


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
