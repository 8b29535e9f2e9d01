"""Allocation of all of an engine's buffers. `pool.py` explains long-lived and borrowed memory.

On the meta device the same code allocates nothing and still knows every size: that is how
`zero_core.plan` counts bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from zero_core.comm.communicator import Communicator
from zero_core.config import Config
from zero_core.core.access import ShownParams
from zero_core.core.grads import Arithmetic, GradientBuffers
from zero_core.core.params import DeviceShard, FlatParams, ShardSource
from zero_core.core.pool import (
    Allocate,
    Arena,
    BufferPool,
    CopyStream,
    RefilledBuffers,
    SegmentViews,
    allocator,
)
from zero_core.core.unit import Unit
from zero_core.layout.arithmetic import Layout, Segment
from zero_core.layout.discovery import Discovered, Quantized
from zero_core.layout.gradient_plan import GradientPlan, plan_segment_gradient
from zero_core.layout.stored import dim_order
from zero_core.protocols import AccumulatingTier, ParamStore, StateTier
from zero_core.sharded.changes.log import ChangeLog
from zero_core.sharded.param_offload import (
    LocalStore,
    OffloadedSegments,
    OffloadedShard,
    PrefetchHints,
)

NUM_SPARE = 2
"""Buffers whose copies to the host may still be under way when the next one is needed."""


class Memory:
    """Allocates parameters, gradients and pools, and makes the units on top of them.

    Attributes:
        stage: the stage that makes a difference: one rank has nothing to shard, but may offload.
        has_sharded_state: whether each rank updates its shard alone.
        has_sharded_params: whether values are gathered for each use.
        device: where memory is allocated.
        spans: each trainable segment's part of the local flat space, by segment.
    """

    def __init__(
        self,
        found: Discovered,
        layout: Layout,
        config: Config,
        *,
        rank: int,
        device: torch.device,
        exchanged: Allocate | None = None,
        is_accelerated: bool,
        offloaded: OffloadedSegments | None = None,
        has_own_tier: bool = False,
    ) -> None:
        """Allocate values for ``rank`` on ``device``. The model's parameters stay as they are.

        Args:
            found: the model's parameters.
            layout: their arithmetic.
            config: the resolved configuration.
            rank: this rank.
            device: where memory is allocated.
            exchanged: allocates what other ranks read (shards and gradients), if that is special.
            is_accelerated: whether the compute device is another one than the host.
            offloaded: the segments whose shards are not on the device, if there are any.
            has_own_tier: whether a program brings the state tier.
        """
        self._has_own_tier = has_own_tier
        self._has_peers = layout.world_size > 1
        self._offloaded = () if offloaded is None else offloaded.segments
        self._offloaded_indices = frozenset(s.index for s in self._offloaded)
        self._param_tier = None if offloaded is None else offloaded.tier
        has_stage = self._has_peers or bool(self._offloaded)
        self.stage = config.zero_optimization.stage if has_stage else 0
        self.has_sharded_state = self.stage >= 1
        self.has_sharded_params = self.stage >= 3
        self._config = config
        self._rank = rank
        self.device = device
        self._stream = CopyStream(device) if self._offloaded else None
        self._private = allocator(device)
        self._exchanged = exchanged or self._private
        self._arena = Arena(self._exchanged)
        self._found = found
        self._layout = layout
        self._views: dict[Hashable, SegmentViews] = {}
        self._pools: list[tuple[str, BufferPool | RefilledBuffers, int]] = []
        # Copies to other memory are under way on an accelerator while the next unit is reduced.
        self._num_spare = NUM_SPARE if is_accelerated else 0
        self._shards: dict[int, Tensor] = {}  # by segment, but for offloaded ones
        self._kept: dict[int, Tensor] = {}  # whole segments that are kept for good
        self._allocate_params()
        self._full_pools = [
            self._pool(
                "gathered units",
                [s.padded_numel * s.dtype.itemsize for s in part],
                _num_at_once([s for s in part if self._is_gathered(s)]),
                self._private if self._stream is None else self._stream.filled_by(self._private),
                queue=self._stream,
            )
            for part in self._split([s for s in layout.segments if not s.is_opaque])
        ]
        self._refilled = [
            self._refilled_buffers(part)
            for part in self._split([s for s in layout.segments if s.is_opaque])
        ]
        self._staging_pools = [
            self._pool(
                "fetched shards",
                [s.shard_numel * s.dtype.itemsize for s in part],
                _num_of_largest_unit(part) if self._has_peers else 0,
                self._private,
                queue=self._stream,
            )
            for part in (self._split(self._offloaded) if self._offloaded else ())
        ]
        self.spans: dict[int, tuple[int, int]] = {}
        for index, start in layout.local_starts(is_sharded=self.has_sharded_state).items():
            low, high = layout.state_range(
                layout.segments[index], rank, is_sharded=self.has_sharded_state
            )
            self.spans[index] = (start, start + high - low)
        self.changes = self._make_changes()

    # ------------------------------------------------------- for the state tier

    def update_targets(self) -> list[tuple[int, Tensor]]:
        """Return what the state tier writes new values to, by start in the local flat space.

        An offloaded shard is where its tier holds it, or on the meta device: see `store`. So is one
        whose changes are logged.
        """
        targets = [(i, span[0], self._update_target(i)) for i, span in self.spans.items()]
        return [
            (start, torch.empty_like(t, device="meta") if self._is_compared(i, t) else t)
            for i, start, t in targets
        ]

    def _is_compared(self, index: int, target: Tensor) -> bool:
        """Whether a log of changes compares a segment's values before it overwrites them."""
        config, dtype = self._config, self._layout.segments[index].dtype
        # A master weight that shares the parameter's bits needs to be at the parameter.
        is_split = config.zero_optimization.offload_optimizer.state_dtype != "float32"
        is_apart = dtype.itemsize == 2 and dtype not in config.own_masters and not is_split
        return config.weight_patches is not None and is_apart and not target.is_meta

    def _make_changes(self) -> ChangeLog | None:
        """Make the log of changed values that patches of the weights need."""
        settings = self._config.weight_patches
        if settings is None or self.device.type == "meta":
            return None
        shards: dict[int, tuple[int, Tensor, tuple[int, int]]] = {}
        for index, (start, stop) in self.spans.items():
            target, segment = self._update_target(index), self._layout.segments[index]
            if self._is_compared(index, target):
                is_shard = stop - start == segment.shard_numel
                own = (0, segment.shard_numel) if is_shard else segment.shard_range(self._rank)
                shards[index] = start, target, own
        return ChangeLog(
            shards,
            sorted((span[0], index) for index, span in self.spans.items()),
            self._local_store(),
            num_versions=settings.versions,
            max_bytes=settings.max_bytes,
        )

    def _update_target(self, index: int) -> Tensor:
        segment = self._layout.segments[index]
        if index in self._offloaded_indices:
            assert self._param_tier is not None
            home = self._param_tier.home(index)
            if home is not None:
                return home
            return torch.empty(segment.shard_numel, dtype=segment.dtype, device="meta")
        start, stop = self.spans[index]
        is_shard = stop - start == segment.shard_numel
        return self._shards[index] if is_shard else self._kept[index]

    def store(self) -> ParamStore | None:
        """Return what takes the new values of shards on the meta device. None if none are there."""
        return self._local_store() if self.changes is None else self.changes

    def _local_store(self) -> LocalStore | None:
        if self._param_tier is None:
            return None
        spans = [(s[0], i) for i, s in self.spans.items() if i in self._offloaded_indices]
        return LocalStore(self._param_tier, spans)

    # ------------------------------------------------------------------- units

    def make_units(
        self, tier: StateTier, communicator: Communicator, arithmetic: Arithmetic
    ) -> list[Unit]:
        """Allocate what gradients need, and make the units, whose shards ``tier`` updates."""
        segments = self._layout.segments
        params = {s.index: self._flat_params(s, tier, communicator) for s in segments}
        adds_grads = isinstance(tier, AccumulatingTier)
        buffers = self.allocate_gradients(owns_grads=tier.owns_grads, adds_grads=adds_grads)
        if isinstance(tier, AccumulatingTier) and any(
            of_segment.plan.is_passed_on_each for of_segment in buffers.values()
        ):
            tier.expect_micro_steps(self._config.gradient_accumulation_steps)
        grads = {
            index: arithmetic.grads_class(
                segments[index],
                [p for p in self._params_of(segments[index]) if isinstance(p, nn.Parameter)],
                of_segment,
                communicator,
                tier,
                self.spans[index],
                self._views_of(segments[index]),
                arithmetic,
            )
            for index, of_segment in buffers.items()
        }
        units, hints = self._layout.units, None
        if self._param_tier is not None:
            offloaded = self._offloaded_indices
            of_units = [
                [params[s.index] for s in u.segments if s.index in offloaded] for u in units
            ]
            hints = PrefetchHints(self._param_tier, of_units, self._layout.last_block)
        return [
            Unit(
                unit.index,
                unit.name,
                [params[s.index] for s in unit.segments],
                [grads[s.index] for s in unit.segments if s.is_trainable],
                hints,
                is_tail=unit.index == self._layout.tail,
            )
            for unit in units
        ]

    def _flat_params(
        self, segment: Segment, tier: StateTier, communicator: Communicator
    ) -> FlatParams:
        index, span = segment.index, self.spans.get(segment.index)
        source: ShardSource
        if index not in self._offloaded_indices:
            source = DeviceShard(index, self._shards[index], communicator, tier, span)
        else:
            assert self._param_tier is not None
            assert self._stream is not None
            source = OffloadedShard(
                segment,
                self._param_tier,
                self._stream,
                staging=self._staging_pools[self._part_of(segment)],
                communicator=communicator,
                tier=tier,
                span=span,
            )
        shown = ShownParams(
            self._params_of(segment),
            self._views_of(segment),
            [self._layout.params[slot.param].name for slot in segment.slots],
            self._quantized_in(segment),
            rank=self._rank,
            has_masters_apart=self._has_own_tier
            or self._config.zero_optimization.offload_optimizer.device != "none"
            or segment.dtype not in self._config.own_masters,
        )
        return FlatParams(
            segment,
            shown,
            rank=self._rank,
            device=self.device,
            source=source,
            kept=self._kept.get(index),
            pool=(self._refilled if segment.is_opaque else self._full_pools)[
                self._part_of(segment)
            ],
            has_remote_updates=self._has_peers and self.has_sharded_state and segment.is_trainable,
        )

    def _quantized_in(self, segment: Segment) -> list[Quantized]:
        """Return the quantized parameters that have components in ``segment``."""
        here = set(map(id, self._params_of(segment)))
        return [q for q in self._found.quantized if not here.isdisjoint(map(id, q.components))]

    def _views_of(self, segment: Segment) -> SegmentViews:
        params = self._params_of(segment)
        slots = [
            (slot.start, slot.stop, p.shape, dim_order(p))
            for slot, p in zip(segment.slots, params, strict=True)
        ]
        key = segment.index if segment.is_opaque else (segment.dtype, segment.padded_numel, *slots)
        if key not in self._views:
            self._views[key] = SegmentViews(segment, params, self.device)
        return self._views[key]

    # ------------------------------------------------------------------ reports

    def report(self) -> dict[str, int]:
        """Return bytes by kind, on this rank, without the state tier's."""
        found = self._report([pool.allocated_bytes for _, pool, _ in self._pools])
        if self.changes is not None:
            found["weight patches"] = self.changes.nbytes
        return found if self._param_tier is None else {**found, **self._param_tier.report()}

    def expected_report(self) -> dict[str, int]:
        """Return what `report` says after steps in which units ran in the module tree's order.

        Two blocks are there at once: one in use and the next one arriving, or one whose gradients
        come in and the last one under reduction. The root and the tail stay gathered.
        """
        return self._report([expected * pool.buffer_bytes for _, pool, expected in self._pools])

    def reserve(self) -> None:
        """Allocate what `expected_report` counts of the pools, before there are activations.

        On an accelerator memory that is allocated later would lie between them.
        """
        for _, pool, expected in self._pools:
            pool.reserve(expected)

    def device_tensors(self) -> dict[str, list[Tensor]]:
        """Return long-lived buffers: see `zero_core.protocols.DeviceMemory`."""
        found: dict[str, list[Tensor]] = {"parameters": [], "gradients": []}
        for kind, buffers in self._arena.buffers.items():
            found["parameters" if kind == "parameters" else "gradients"] += buffers
        return found

    def free_pools(self) -> None:
        """Free the memory of all pools that is not lent."""
        for _, pool, _ in self._pools:
            pool.free()

    def shrink_pools(self) -> None:
        """Free what pools hold beyond what `reserve` allocates, unless it is lent."""
        for _, pool, expected in self._pools:
            pool.free(keep=expected)
        self.forget_views()

    def forget_views(self) -> None:
        """Forget views by address: buffers have other addresses now, or are gone."""
        for views in self._views.values():
            views.forget()

    def _report(self, pool_bytes: Sequence[int]) -> dict[str, int]:
        report = self._arena.report()
        for (kind, _, _), nbytes in zip(self._pools, pool_bytes, strict=True):
            report[kind] = report.get(kind, 0) + nbytes
        return report

    # --------------------------------------------------------------- allocation

    def _split(self, segments: Sequence[Segment]) -> list[list[Segment]]:
        """Split segments into parts of the model whose buffers are in use for different times."""
        parts: list[list[Segment]] = [[] for _ in range(2 + self._layout.has_tail)]
        for segment in segments:
            parts[self._part_of(segment)].append(segment)
        return parts

    def _part_of(self, segment: Segment) -> int:
        """Return the part of the model: root, blocks, tail."""
        return 2 if segment.unit == self._layout.tail else min(segment.unit, 1)

    def _params_of(self, segment: Segment) -> list[Tensor]:
        return [self._found.params[slot.param] for slot in segment.slots]

    def _pool(
        self,
        kind: str,
        nbytes: Sequence[int],
        num_at_once: int,
        allocate: Allocate,
        *,
        num_spare: int = 0,
        queue: CopyStream | None = None,
    ) -> BufferPool:
        """Make a pool for requests of ``nbytes``, of which ``num_at_once`` are lent together."""
        pool = BufferPool(allocate, max(nbytes, default=0), num_spare=num_spare, queue=queue)
        self._pools.append((kind, pool, num_at_once + num_spare))
        return pool

    def _refilled_buffers(self, segments: Sequence[Segment]) -> RefilledBuffers:
        """Make the buffers of components that are gathered for each use."""
        nbytes = max((s.padded_numel for s in segments), default=0)
        buffers = RefilledBuffers(self.device, nbytes, queue=self._stream)
        num_at_once = _num_at_once([s for s in segments if self._is_gathered(s)])
        self._pools.append(("gathered units", buffers, num_at_once))
        return buffers

    def _spares(self, num_users: int, num_at_once: int) -> int:
        """Return the buffers beyond ``num_at_once`` for copies that are still under way.

        Each of ``num_users`` borrows once in a backward: more buffers than that are of no use. So
        the root, whose segments are lent together, has no spare ones.
        """
        return min(self._num_spare, num_users - num_at_once)

    def _is_gathered(self, segment: Segment) -> bool:
        """Whether the segment's values are gathered for each use, and not kept for good."""
        is_whole = not self._has_peers and segment.index not in self._offloaded_indices
        return self.has_sharded_params and not is_whole

    def _allocate_params(self) -> None:
        segments = [s for s in self._layout.segments if s.index not in self._offloaded_indices]
        whole = [s for s in segments if not self._is_gathered(s)]
        sizes = {s.index: (s.dtype, s.shard_numel) for s in segments}
        sizes |= {s.index: (s.dtype, s.padded_numel) for s in whole}
        self._shards |= self._arena.allocate("parameters", sizes)
        for s in whole:
            self._kept[s.index] = self._shards[s.index]
            self._shards[s.index] = self._kept[s.index][slice(*s.shard_range(self._rank))]

    def allocate_gradients(
        self, *, owns_grads: bool, adds_grads: bool
    ) -> dict[int, GradientBuffers]:
        """Allocate what gradients need, by trainable segment.

        There are no gradient shards if the state tier copies gradients (``owns_grads``), unless
        they add up over micro-steps and it cannot do that (``adds_grads``).
        """
        segments = [s for s in self._layout.segments if s.is_trainable]
        plans = {
            s.index: plan_segment_gradient(
                s, self._config, stage=self.stage, owns_grads=owns_grads, adds_grads=adds_grads
            )
            for s in segments
        }
        allocate = self._arena.allocate
        full = allocate(
            "gradients",
            {
                s.index: (plans[s.index].communicated, s.padded_numel)
                for s in segments
                if plans[s.index].is_full_kept
            },
        )
        # A reduction leaves the kept gradients free: they hold the sum, if it fits.
        total = {i: full[i] for i, p in plans.items() if p.is_sum_in_full}
        shards: dict[int, Tensor] = {}
        if self._has_peers and self.stage == 0:
            rest = [s for s in segments if s.index not in total]
            total |= allocate(
                "gradients", {s.index: (plans[s.index].accumulated, s.padded_numel) for s in rest}
            )
            # The sum that is gathered into begins as this rank's slice of it.
            shards = {s.index: total[s.index][slice(*s.shard_range(self._rank))] for s in rest}
        shards |= allocate(
            "gradient shards",
            {
                s.index: (plans[s.index].accumulated, s.shard_numel)
                for s in segments
                if s.index not in shards and plans[s.index].is_shard_kept
            },
        )
        full_pools = self._full_grad_pools(segments, plans)
        shard_pools = [self._shard_pool(part, plans) for part in self._split(segments)]
        rounded_pools = [self._rounded_pool(part, plans) for part in self._split(segments)]
        return {
            s.index: GradientBuffers(
                plans[s.index],
                full.get(s.index),
                shards.get(s.index),
                total.get(s.index),
                full_pools[self._part_of(s)],
                shard_pools[self._part_of(s)],
                rounded_pools[self._part_of(s)],
            )
            for s in segments
        }

    def _shard_pool(
        self, segments: Sequence[Segment], plans: Mapping[int, GradientPlan]
    ) -> BufferPool:
        """Make the pool of reduced gradients that are passed on."""
        passed_on = [s for s in segments if not plans[s.index].is_shard_kept and self._has_peers]
        num_at_once = _num_of_largest_unit(passed_on)
        is_read_by_tier = not any(self._is_rounded(plans[s.index]) for s in passed_on)
        return self._pool(
            "gradient shards",
            [s.shard_numel * plans[s.index].accumulated.itemsize for s in segments],
            num_at_once,
            self._exchanged,
            num_spare=self._spares(len(passed_on), num_at_once) if is_read_by_tier else 0,
        )

    def _rounded_pool(
        self, segments: Sequence[Segment], plans: Mapping[int, GradientPlan]
    ) -> BufferPool:
        """Make the pool of what is offered in another dtype than it was reduced in."""
        rounded = [s for s in segments if self._is_rounded(plans[s.index])]
        num_at_once = _num_of_largest_unit(rounded)
        is_whole = self.stage == 0  # each rank updates all of a segment
        return self._pool(
            "rounded gradients",
            [
                (s.padded_numel if is_whole else s.shard_numel) * plans[s.index].offered.itemsize
                for s in segments
            ],
            num_at_once,
            self._private,
            num_spare=self._spares(len(rounded), num_at_once),
        )

    def _is_rounded(self, plan: GradientPlan) -> bool:
        """Whether a segment's gradient is rounded when it is offered."""
        is_as_communicated = not self._has_peers and not plan.is_shard_kept
        return plan.offered != plan.accumulated and not is_as_communicated

    def _full_grad_pools(
        self, segments: Sequence[Segment], plans: Mapping[int, GradientPlan]
    ) -> list[dict[torch.dtype, BufferPool]]:
        """Make the pools of whole gradients, one for each part of the model, by dtype."""
        plan_dtypes = [(p.communicated, p.accumulated) for p in plans.values()]
        dtypes = {c for c, _ in plan_dtypes} | {a for _, a in plan_dtypes}
        return [
            {dtype: self._full_grad_pool(part, plans, dtype) for dtype in dtypes}
            for part in self._split(segments)
        ]

    def _full_grad_pool(
        self, segments: Sequence[Segment], plans: Mapping[int, GradientPlan], dtype: torch.dtype
    ) -> BufferPool:
        borrowed = [s for s in segments if self._is_borrowed(plans[s.index], dtype)]
        num_at_once = _num_at_once(borrowed)
        # One rank that passes gradients on: the only buffer is what the tier reads.
        is_read_by_tier = not self._has_peers
        return self._pool(
            "gradients under way",
            [s.padded_numel * dtype.itemsize for s in segments],
            num_at_once,
            self._exchanged,
            num_spare=self._spares(len(borrowed), num_at_once) if is_read_by_tier else 0,
        )

    def _is_borrowed(self, plan: GradientPlan, dtype: torch.dtype) -> bool:
        """Whether each backward borrows a buffer of ``dtype`` for the gradients."""
        is_borrowed = not plan.is_full_kept if self._has_peers else not plan.is_shard_kept
        return is_borrowed and plan.communicated == dtype


def _num_of_largest_unit(segments: Sequence[Segment]) -> int:
    """Return how many segments the unit has that has the most of them."""
    return max(Counter(s.unit for s in segments).values(), default=0)


def _num_at_once(segments: Sequence[Segment]) -> int:
    """Return the most segments of two consecutive units. Of the one unit, if there is but one."""
    counts = list(Counter(s.unit for s in segments).values())
    return max(map(sum, pairwise(counts)), default=sum(counts))
