"""Flat gradients: the gradients of one segment, from backward to the state tier.

See [Note: the tensors of a segment] in `zero_core.core.unit`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zero_core.comm.communicator import Communicator, NamedWork
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
    """Memory of one segment's gradient, as its plan requires."""

    plan: GradientPlan
    full: Tensor | None  # ``full_grad``, or None if a pool lends it
    shard: Tensor | None  # ``grad_shard``, or None if only the state tier keeps it
    total: Tensor | None  # ``grad_sum``, or None except at stage 0 with several ranks
    full_pools: Mapping[torch.dtype, BufferPool]  # lend ``full_grad`` if it is not in ``full``
    shard_pool: BufferPool  # lends the reduction's output if ``shard`` is None
    rounded_pool: BufferPool  # lends memory for gradients rounded for the tier
    term_pool: BufferPool  # lends outputs of a step's later reductions


class ReducedGrad(NamedTuple):
    """The reduced gradient of a segment. Call `FlatGrads.wait` before reading."""

    shard: Tensor  # the gradient for the tier: 1-D, in the offered dtype
    # 2-norm of this rank's shard, in fp32 or wider. With a sequential plan, one norm per chunk.
    # None if ``shard`` is one micro-step's gradient, because the tier accumulates gradients.
    norm: Tensor | None


class FullGrad:
    """This rank's gradient of a segment before reduction: ``full_grad``.

    Attributes:
        is_wide: whether several backwards accumulate until the next reduction, in the accumulation
            dtype. All ranks must set the same value, which determines the reduction's dtype.
        memory: [padded_numel], the gradients added since the last reduction. None if none were.
        until_read: work that ends when the other ranks have read ``memory``.
    """

    def __init__(
        self, segment: Segment, buffers: GradientBuffers, views: SegmentViews, missing: float
    ) -> None:
        """``missing``: value of the gradient of a parameter that backward did not reach."""
        self.is_wide = False
        self.memory: Tensor | None = None
        self.until_read: NamedWork | None = None
        self._segment = segment
        self._plan = plan = buffers.plan
        # With one rank nothing is reduced, and gradients accumulate directly in ``grad_shard``.
        self._kept = buffers.shard if plan.case is GradientCase.ALONE else buffers.full
        self._pools = buffers.full_pools
        self._views = views
        self._predivide = plan.predivide
        # On a CPU, _foreach_mul rounds a Python number to the tensors' 16-bit dtype.
        self._factor = torch.tensor(plan.predivide, dtype=torch.float64, device="cpu")
        self._missing = missing
        self._is_small = plan.small_slots(segment, is_cpu=views.placeholders.slots[0].is_cpu)
        self._max_held = plan.held_numel(segment)
        self.held: dict[int, Tensor] = {}  # gradients to add, by position
        self._held_numel = 0
        self._undivided: list[Tensor] = []  # slots with gradients that were copied but not divided
        self._slots: list[Tensor] = []  # views of the memory, one per parameter
        self._gaps: list[Tensor] = []  # views of padding between and after parameters
        self._added: set[int] = set()  # positions of gradients in the memory

    def open(self, dtype: torch.dtype | None = None) -> Tensor:
        """Acquire memory. ``dtype`` defaults to the dtype in which gradients are added."""
        if dtype is None:
            is_accumulated = self.is_wide or self._plan.case is GradientCase.ALONE
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
        """Add a gradient. Gradients of small parameters are held, and added together later."""
        view, is_small = self._slots[position], self._is_small[position]
        given, into = grad.dtype, view.dtype
        wide = given if given is into else torch.promote_types(given, into)
        is_held = into is wide and (is_small or given is not into)
        if position in self.held or (self._undivided and position in self._added and not is_held):
            self.flush()  # first the earlier gradient, which may have another dtype
        if is_held:
            self.held[position] = grad
            self._held_numel += view.numel()
            if not is_small or self._held_numel >= self._max_held:
                self._add_held()
        elif position in self._added:
            self._sum([view], [grad], wide)
        else:  # divide in the wider of the two dtypes, then cast
            self._added.add(position)
            torch.mul(grad if given is wide else grad.to(wide), self._predivide, out=view)

    def flush(self) -> None:
        """Add the held gradients to the memory, and divide those that were only copied."""
        if self.held:
            self._add_held()
        if self.memory is not None and len(self._undivided) == len(self._slots):
            self.memory.mul_(self._predivide)
        elif self._undivided:
            torch._foreach_mul_(self._undivided, self._factor)
        self._undivided = []

    def _add_held(self) -> None:
        held, self.held, self._held_numel = self.held, {}, 0
        if first := sorted(held.keys() - self._added):
            self._added.update(first)
            views = [*map(self._slots.__getitem__, first)]
            torch._foreach_copy_(views, [*map(held.pop, first)])
            if self._predivide != 1.0:
                self._undivided += views  # dividing later avoids wide temporaries
        if held:
            self.flush()
            views = [*map(self._slots.__getitem__, held)]
            self._sum(views, [*held.values()], views[0].dtype)

    def _sum(self, views: list[Tensor], grads: list[Tensor], dtype: torch.dtype) -> None:
        if dtype.itemsize < 4 and self._predivide != 1.0:  # a CPU would round ``alpha`` to 16 bits
            torch._foreach_add_(views, torch._foreach_mul(grads, self._factor))
        else:
            torch._foreach_add_(views, grads, alpha=self._predivide)

    def added(self, position: int) -> Tensor | None:
        """Return a view of a parameter's gradient since the last reduction, or None."""
        self.flush()
        return None if self.memory is None or position not in self._added else self._slots[position]

    def complete(self) -> Tensor:
        """Return the memory, ready for reduction. Fills the gradients of unused parameters."""
        full = self.memory
        assert full is not None, "it is open"
        self.flush()
        if len(self._added) < len(self._slots):
            for position in {*range(len(self._slots))} - self._added:
                self._slots[position].fill_(self._missing)
        if self._gaps:
            torch._foreach_zero_(self._gaps)
        if self._segment.world_size == 1:  # later gradients are added to the memory
            self._added.update(range(len(self._slots)))
            return full
        self._added.clear()
        dtype = self._plan.communicated_sums
        if self.is_wide and full.dtype is not dtype:
            wide, full = full, self.open(dtype).copy_(full)
            self._pools[wide.dtype].release(wide, None)
        return full

    def pass_on(self) -> tuple[BufferPool, Tensor]:
        """Transfer ownership of a single rank's gradient. Return its pool and its memory."""
        full, self.memory = self.memory, None
        assert full is not None, "it is open"
        self._added.clear()
        return self._pools[full.dtype], full

    def close(self) -> None:
        """Release the memory, which is reused when other ranks have read it."""
        self.is_wide = False
        full, self.memory = self.memory, None
        if full is None or full is self._kept:
            return
        until_read, self.until_read = self.until_read, None
        readers = None if until_read is None else until_read.wait
        self._pools[full.dtype].release(full, readers)

    def clear(self) -> None:
        self.held, self._held_numel, self._undivided = {}, 0, []
        self._added.clear()
        self.close()

    def wait_until_read(self) -> None:
        if self.until_read is not None:
            until_read, self.until_read = self.until_read, None
            until_read.wait()

    def synchronize(self) -> None:
        """Wait until no rank reads the memory, and drop the views of pool memory."""
        self.wait_until_read()
        if self.memory is None:
            self._slots, self._gaps = [], []


class GradShard:
    """``grad_shard``: this rank's reduced gradient of the micro-steps so far.

    Attributes:
        is_empty: whether nothing was added since the last step.
        is_used_at_once: whether `offer` reads the gradient immediately.
        is_part: whether the gradient is one micro-step's, because the tier accumulates gradients.
        until_gathered: work that ends when the tensor returned by `offer` is complete, or None.
    """

    is_part = False

    def __init__(self, segment: Segment, buffers: GradientBuffers, tier: StateTier) -> None:
        self.is_empty = True
        self.is_used_at_once = tier.owns_grads  # such a tier copies gradients when offered
        self._segment = segment
        self._plan = buffers.plan
        self._shard = buffers.shard
        self.until_gathered: NamedWork | None = None
        self._until_copied: Wait | None = None  # waits for the state tier's copy
        self._term_pool = buffers.term_pool
        self._term: Tensor | None = None  # borrowed output of a later reduction of the step
        self._rounded_pool = buffers.rounded_pool
        self._rounded: Tensor | None = None  # the tensor offered to the tier, if rounded

    def target(self) -> Tensor:
        """Return the output tensor of the next reduction, [shard_numel].

        A reduction of a sequential plan adds to this tensor instead of overwriting it.
        """
        shard = self._shard
        assert shard is not None, "the case has one"
        if not (self.is_empty or self._plan.is_sequential):
            self._term = self._term_pool.acquire(shard.numel(), shard.dtype, self._segment.index)
            return self._term
        if self._until_copied is not None:
            self.wait_until_copied()
        return shard

    def add(self, reduced: Tensor) -> bool:
        """Add a reduction's output. Return whether ``reduced`` is now the whole gradient."""
        self.is_empty = False
        if reduced is self._shard:
            return True
        self.values().add_(reduced)
        self._return_term()
        return False

    def _return_term(self) -> None:
        if self._term is not None:
            term, self._term = self._term, None
            self._term_pool.release(term)

    def add_own(self, full: FullGrad) -> None:
        """Add the gradient of a single rank, which is already in the shard's memory."""
        self.is_empty = False

    def values(self) -> Tensor:
        """Return the shard of the gradient, [shard_numel]. Callers must not write to it."""
        assert self._shard is not None, "the case has one"
        return self._shard

    def covered(self) -> Tensor:
        """Return the gradient of all elements whose optimizer state is on this rank."""
        return self.values()

    def replace(self, start: int, values: Tensor) -> None:
        """Replace elements of the shard from element ``start`` on."""
        self.wait_until_copied()
        self.values()[start : start + values.numel()].copy_(values)

    def change(self, changes: Sequence[tuple[int, Tensor]]) -> None:
        """Replace elements of `covered`. Each change is a start and the new elements."""
        for start, values in changes:
            self.replace(start, values)

    def rounded(self) -> Tensor:
        """Return the shard in the offered dtype, as used for its norm."""
        return self.to_offered(self.values())

    def offer(self, rounded: Tensor) -> Tensor:
        """Return the tensor to offer to the state tier. ``rounded`` is the result of `rounded`."""
        return rounded

    def to_offered(self, values: Tensor) -> Tensor:
        """Return ``values`` in the offered dtype. A conversion uses borrowed memory."""
        dtype = self._plan.offered
        if values.dtype is dtype:
            return values
        if self._rounded is None:
            user = self._segment.index
            self._rounded = self._rounded_pool.acquire(values.numel(), dtype, user)
        return self._rounded.copy_(values)

    def release(self, until_copied: Wait | None) -> None:
        """Release memory offered to the state tier. ``until_copied`` waits for the tier's copy."""
        if self._rounded is not None:  # then the tier reads only the rounded tensor
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
        self._return_term()


class SummedShard(GradShard):
    """``grad_shard`` and ``grad_sum`` (the gathered shards of all ranks) at stage 0."""

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
        self._total = buffers.total
        self.is_used_at_once = True
        self._owns_grads = tier.owns_grads
        self._full = full
        self._communicator = communicator
        self._range = segment.shard_range(communicator.rank)
        self._changed: Tensor | None = None  # the next reduction is added to this tensor

    def add(self, reduced: Tensor) -> bool:
        if self._changed is not None:
            # When a reduction ends, all ranks have read the shards, which may then change.
            self.values().copy_(self._changed)
            self._changed = None
        if self._plan.normed is not None and self._plan.rounded is not reduced.dtype:
            reduced.copy_(reduced.to(self._plan.rounded))
        return super().add(reduced)

    def covered(self) -> Tensor:
        return self._total

    def rounded(self) -> Tensor:
        shard, dtype = self.values(), self._plan.offered
        return shard.to(dtype) if dtype is torch.float16 else shard

    def offer(self, rounded: Tensor) -> Tensor:
        self._full.wait_until_read()  # the sum may share the memory of ``full_grad``
        gathered = self._communicator.all_gather(
            self._total, self.values(), self._segment.index, version=EXACT_GRADIENTS, backward=True
        )
        if self._owns_grads:  # the tier copies the gradient immediately
            gathered.wait()
        else:
            self.until_gathered = gathered
        return self.to_offered(self._total)

    def change(self, changes: Sequence[tuple[int, Tensor]]) -> None:
        """Replace elements of ``grad_sum`` and of the shard: see `FlatGrads.change`."""
        for start, values in changes:
            self.wait_until_copied()
            self._total[start : start + values.numel()].copy_(values)
        if self._plan.is_sum_in_full:  # then the shard is not a view of the sum
            self.values().copy_(self._total[slice(*self._range)])

    def keep(self, changes: Sequence[tuple[int, Tensor]]) -> None:
        """Save ``changes`` for the next reduction, as other ranks may still read the shard."""
        low, high = self._range
        kept = self._total[low:high].clone()
        for at, values in changes:
            start, stop = max(at, low), min(at + values.numel(), high)
            if start < stop:
                kept[start - low : stop - low].copy_(values[start - at : stop - at])
        self._changed = kept

    def clear(self) -> None:
        super().clear()
        self._changed = None


class PassedOnShard(GradShard):
    """A reduced gradient in borrowed memory, held until the state tier has copied it.

    The gradient is a step's, or one micro-step's. If a micro-step's gradient is replaced, the new
    values count as the gradient of the whole step.
    """

    def __init__(
        self,
        segment: Segment,
        buffers: GradientBuffers,
        tier: StateTier,
        span: tuple[int, int],
        device: torch.device,
    ) -> None:
        super().__init__(segment, buffers, tier)
        self.is_part = self._plan.is_passed_on_each
        self._tier = tier
        self._span = span
        self._device = device
        self._pool = buffers.shard_pool
        self._lent: tuple[BufferPool, Tensor] | None = None  # pool and buffer of the shard

    def target(self) -> Tensor:
        numel, user = self._segment.shard_numel, self._segment.index
        if self._lent is not None:  # the shard holds an earlier reduction of this step
            self._term = self._term_pool.acquire(numel, self._plan.accumulated, user)
            return self._term
        target = self._pool.acquire(numel, self._plan.accumulated, user)
        self._lent = self._pool, target
        return target

    def add(self, reduced: Tensor) -> bool:
        is_first, self.is_empty = self.is_empty or self.is_part, False
        if self._shard is not None:
            self._shard.add_(reduced)
            self._return_term()
            return False
        if is_first:
            self._shard = reduced
        else:  # the tier holds the earlier reductions' sum
            self._shard = self.values().to(self._plan.accumulated, copy=True).add_(reduced)
        return is_first

    def add_own(self, full: FullGrad) -> None:
        if full.memory is not None:  # None on a retry, after Ctrl-C in `FlatGrads.finish`
            self._lent = full.pass_on()
            self.add(self._lent[1])

    def values(self) -> Tensor:
        if self._shard is not None:
            return self._shard
        return self._tier.read_grad(*self._span).to(self._device)

    def replace(self, start: int, values: Tensor) -> None:
        self._shard = self.values().to(self._plan.accumulated, copy=True)
        super().replace(start, values)
        self.is_part = False

    def rounded(self) -> Tensor:
        is_replaced = self._plan.is_passed_on_each and not self.is_part
        return self.values() if is_replaced else super().rounded()

    def release(self, until_copied: Wait | None) -> None:
        super().release(until_copied)
        self._return_memory()

    def _return_memory(self) -> None:
        self._shard = None
        self.is_part = self._plan.is_passed_on_each
        until_copied, self._until_copied = self._until_copied, None
        if self._lent is not None:
            (pool, buffer), self._lent = self._lent, None
            pool.release(buffer, until_copied)

    def clear(self) -> None:
        super().clear()
        self._return_memory()


class FlatGrads:
    """The gradients of one trainable segment.

    In a backward, `add` is called for each parameter, then `reduce` and `finish`. At an
    accumulation boundary (in every micro-step if the tier accumulates gradients), `result` goes to
    the step, and `GradShard.release` follows. `clear` starts a new step.

    Attributes:
        params: the model's parameters, in the order of the slots.
        param_numbers: the parameters' numbers in the layout.
        full: this rank's gradient before reduction.
        shard: the reduced gradient.
        is_updated: whether an update has used the gradient, so that this step may not add to it.
    """

    _missing = 0.0  # gradient of a parameter that has none

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
        """``span`` is the range of this rank's shard in the local flat space."""
        self.segment = segment
        self.params = list(params)
        self.plan = plan = buffers.plan
        self.param_numbers = [slot.param for slot in segment.slots]
        self.views = views
        self.full = FullGrad(segment, buffers, views, self._missing)
        self.shard: GradShard
        if plan.case is GradientCase.WHOLE_SUM:
            self.shard = SummedShard(segment, buffers, tier, self.full, communicator)
        elif plan.is_shard_kept:
            self.shard = GradShard(segment, buffers, tier)
        else:
            device = views.placeholders.slots[0].device
            self.shard = PassedOnShard(segment, buffers, tier, span, device)
        self._communicator = communicator
        self._arithmetic = arithmetic
        self._reduction: NamedWork | None = None  # pending
        self._target: Tensor | None = None  # the pending reduction's output
        self._norm: Tensor | None = None  # norm of the shard, if known
        self._until_reduced: NamedWork | None = None  # ends when the reduced sum is complete
        self._nonfinite: Tensor | None = None  # by rank: bool, [world_size]
        self.is_updated = False

    def begin_backward(self) -> None:
        """Called when a backward begins."""

    def add(self, position: int, grad: Tensor) -> None:
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
            self.wait()  # end the reduction of a dropped or repeated step
        if self.plan.case is GradientCase.ALONE:  # full_grad is grad_shard
            self.shard.wait_until_copied()
        self.full.open()

    def reduce(self) -> None:
        """Start to reduce the added gradients. Gradients of unused parameters count as zero."""
        if self.full.memory is None:
            self._open()
        full = self.full.complete()
        if self.segment.world_size > 1:
            self._target = self.shard.target()
            self._reduction = self._start_reduction(self._target, full)

    def _start_reduction(self, target: Tensor, full: Tensor) -> NamedWork:
        return self._communicator.reduce_scatter(target, full, self.segment.index)

    def finish(self) -> None:
        """Add the reduction's output to the step's gradient.

        Waits for the reduction, unless the reduction computes its own statistics and the output is
        not used yet. In that case call `wait` before using the output.
        """
        work, self._reduction = self._reduction, None
        if work is None:  # single rank
            self.shard.add_own(self.full)
            self._norm = None
            self.full.close()
            return
        reduced, self._target = self._target, None
        assert reduced is not None, "of the reduction"
        statistics, nonfinite = work.statistics(), None
        if statistics is not None:
            self._until_reduced = self.full.until_read = work
            if self.shard.is_used_at_once or not self.shard.is_empty:  # the output is used now
                self.wait()
            self._norm = self._arithmetic.of_reduction(statistics.norm)
            nonfinite = statistics.nonfinite
        else:
            work.wait()
            self._norm = norm = self._arithmetic.measure(reduced)
            # A finite norm means finite contributions, and reading a CPU norm is free. Reading a
            # device norm would synchronize, so check the contributions on the device.
            total = norm.sum() if norm.dim() else norm
            if not (norm.is_cpu and math.isfinite(total.item())):
                parts = work.contributions()
                if parts:
                    nonfinite = torch.stack([~torch.isfinite(part).all() for part in parts])
            self.full.until_read = work.acknowledge()
        if nonfinite is not None:
            self._nonfinite = nonfinite if self._nonfinite is None else self._nonfinite | nonfinite
        if not self.shard.add(reduced) or self.plan.normed is not None:
            self._norm = None  # covers only the last reduction, or has another dtype
        self.full.close()

    def result(self) -> ReducedGrad:
        """Return the gradient to offer to the state tier.

        It is the step's gradient, or the micro-step's if the tier accumulates. At stage 0 with
        several ranks, the call starts an all-gather. Read the result after `wait`, or immediately
        if the tier owns gradients.
        """
        rounded = self.shard.rounded()
        if self.shard.is_part:
            return ReducedGrad(rounded, None)
        if rounded.dtype is torch.float16 and self.plan.accumulated is not torch.float16:
            # The cast to fp16 may overflow, so take the norm after the cast.
            self._norm = self._arithmetic.measure(rounded)
        norm = self.norm()
        return ReducedGrad(self.shard.offer(rounded), norm)

    def changed_result(self) -> ReducedGrad:
        """Return the same as `result` after `change`, without a collective."""
        if not isinstance(self.shard, SummedShard):
            return self.result()
        return ReducedGrad(self.shard.to_offered(self.covered()), self.norm())

    def wait(self) -> None:
        """Wait until the gradient returned by `result` is complete."""
        if self._until_reduced is not None:
            until_reduced, self._until_reduced = self._until_reduced, None
            until_reduced.wait()
            if self.full.until_read is until_reduced:
                self.full.until_read = None
        if self.shard.until_gathered is not None:
            until_gathered, self.shard.until_gathered = self.shard.until_gathered, None
            until_gathered.wait()

    def synchronize(self) -> None:
        """Wait until the gradient's memory is unused, and drop the views of pool memory."""
        self.wait()
        self.full.synchronize()
        self.shard.wait_until_copied()

    def values(self) -> Tensor:
        """Return this rank's shard of the reduced gradient, [shard_numel], for reading only."""
        self.wait()
        return self.shard.values()

    def covered(self) -> Tensor:
        self.wait()
        return self.shard.covered()

    def replace(self, start: int, values: Tensor) -> None:
        """Replace elements of `values` from element ``start`` on."""
        self.wait()
        self._norm = None
        self.shard.replace(start, values)

    def change(self, changes: Sequence[tuple[int, Tensor]]) -> None:
        """Apply ``changes`` (pairs of a start and new elements), and in-place edits of `covered`.

        Call it after all ranks have agreed on the gradient: until then they may read this shard.
        """
        self.wait()
        self._norm = None
        self.shard.change(changes)

    def norm(self, p: float = 2.0) -> Tensor:
        """Return the ``p``-norm of the shard, in fp32 or wider: see `ReducedGrad`."""
        if p == 2.0 and self._norm is not None:
            return self._norm
        return self._arithmetic.measure(self.values(), p, self.plan.normed)

    def nonfinite_ranks(self) -> list[int] | None:
        """Return the ranks whose non-finite gradients this rank has observed. [0] on a single rank.

        Every rank with non-finite gradients is observed by at least one rank. Returns None if the
        collectives do not expose contributions, or, on a CPU, if the output of each reduction was
        finite.
        """
        if self.segment.world_size == 1:
            return [0]
        if self._nonfinite is None:
            return None
        ranks: list[int] = torch.nonzero(self._nonfinite).flatten().tolist()
        return ranks

    def clear(self) -> None:
        self.is_updated = False
        if self._reduction is not None and self._reduction.statistics() is not None:
            self._until_reduced = self.full.until_read = self._reduction  # still reads full_grad
        self._reduction = self._target = self._norm = self._nonfinite = None
        self.full.clear()
        self.shard.clear()


class Arithmetic:
    """Sums and norms of gradients. A subclass may add in another order."""

    num_sums: int = 1  # length of the vector that `add_squares` returns
    grads_class: type[FlatGrads] = FlatGrads

    def check(self, config: Config, communicator: Communicator, ranks: Ranks) -> None:
        """Raise ConfigError for collectives or settings that would change result bits."""

    measure = staticmethod(norm_of)
    """Return the ``p``-norm of a shard, 0-dim, or of each of its chunks, in fp32 or wider.

    ``dtype``: the dtype in which powers are summed.
    """

    def of_reduction(self, norm: Tensor) -> Tensor | None:
        """Return ``norm``, computed during a reduction, if it equals the result of `measure`."""
        return norm

    def add_squares(self, norms: Sequence[Tensor], squares: Sequence[Tensor]) -> Tensor:
        """Sum the squares of all segments: [num_sums], float64, for the sum over ranks.

        ``norms``: results of `measure`. ``squares``: other segments' sums of squares, [1] each.
        """
        sums = [*squares]
        if norms:
            sums.append(torch.stack([*norms]).to(torch.float64).square())
        return torch.cat(sums).sum().view(1)

    def finish(self, sums: Tensor) -> None:
        """Reduce ``sums``, the ranks' total of `add_squares`, to one sum in the first element."""

    def over_ranks(self, norms: Sequence[Tensor], p: float, control: ControlGroup) -> float:
        """Return the ``p``-norm over all ranks' segment ``norms``. All ranks must call it."""
        local = torch.linalg.vector_norm(torch.stack([*norms]), p)
        return float(torch.linalg.vector_norm(control.gather(local.view(1)), p))
