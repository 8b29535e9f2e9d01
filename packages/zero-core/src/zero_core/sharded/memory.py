"""Allocation of parameters and gradients, in an arena and pools: see `zero_core.core.pool`.

On the meta device the same code computes every size without allocating memory. `zero_core.plan`
uses this to count bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from zero_core.comm.communicator import Communicator
from zero_core.config import Config
from zero_core.core.access import ShownParams
from zero_core.core.grads import Arithmetic, GradientBuffers
from zero_core.core.params import FlatParams, Shard
from zero_core.core.pool import (
    Allocate,
    Arena,
    BufferPool,
    CopyStream,
    SegmentViews,
    Wait,
    allocator,
)
from zero_core.core.unit import Unit
from zero_core.layout.arithmetic import Layout, Segment
from zero_core.layout.discovery import Discovered
from zero_core.layout.gradient_plan import GradientPlan, plan_gradient
from zero_core.protocols import AccumulatingTier, ParamStore, ParamTier, StateTier
from zero_core.sharded.changes import ChangeLog
from zero_core.sharded.param_offload import (
    LocalStore,
    OffloadedShard,
    PrefetchHints,
)

_NUM_SPARE = 2  # extra buffers of a pool, so that copies to the host can finish before reuse


class RefilledBuffers(BufferPool):
    """Pool with one buffer per user. Releasing a buffer frees its bytes but keeps its storage.

    For components of quantized parameters: a quantizer's kernel (such as bitsandbytes') may keep a
    view of a gathered weight from forward to backward, unseen by autograd's hooks. In other pools
    the view could show another unit's values. Here it shows the right values when the unit is
    gathered again.
    """

    def __init__(
        self, device: torch.device, buffer_bytes: int, *, queue: CopyStream | None = None
    ) -> None:
        super().__init__(allocator(device), buffer_bytes, queue=queue)
        self._of: dict[Hashable, Tensor] = {}
        self._lent_bytes = 0
        self._most_bytes = 0  # maximum of _lent_bytes

    def acquire(self, numel: int, dtype: torch.dtype, user: Hashable) -> Tensor:
        buffer = self._of.get(user)
        if buffer is None:
            with torch.inference_mode(False):  # so that training can use the memory
                buffer = self._of[user] = self._allocate(numel, dtype)
        elif not buffer.untyped_storage().nbytes():
            buffer.untyped_storage().resize_(numel * dtype.itemsize)
        if self._queue is not None:
            self._queue.follow()  # earlier work may still use the memory
        self._lent_bytes += buffer.nbytes
        self._most_bytes = max(self._most_bytes, self._lent_bytes)
        return buffer

    def release(self, view: Tensor, readers: Wait | None = None) -> None:
        self._lent_bytes -= view.nbytes
        view.untyped_storage().resize_(0)

    def reserve(self, num_buffers: int) -> None:
        """Do nothing, because memory is allocated for each use."""

    @property
    def allocated_bytes(self) -> int:
        return self._most_bytes


class Memory:
    """Memory of an engine: parameters, gradients and pools. It also builds the units.

    The expected numbers of buffers hold for steps that use units in the module tree's order and
    prefetch one unit. Then at most two blocks are in memory at once: one in use while the next is
    gathered, or one that accumulates gradients while the previous one is reduced. The root and the
    tail stay gathered.
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
        offloaded: Sequence[Segment] = (),
        param_tier: ParamTier | None = None,
    ) -> None:
        """Allocate values for ``rank`` on ``device``. The model's parameters do not change.

        ``exchanged``: special allocator of memory that other ranks read (shards and gradients).
        ``offloaded``: segments whose shards ``param_tier`` holds, which is None in a plan.
        """
        self._found = found
        self._layout = layout
        self._config = config
        self._rank = rank
        self.device = device
        self._offloaded, self._param_tier = frozenset(s.index for s in offloaded), param_tier
        self._has_peers = layout.world_size > 1
        # A single rank has nothing to shard, but may offload.
        has_stage = self._has_peers or self._offloaded
        self._stage = config.zero_optimization.stage if has_stage else 0
        self.has_sharded_state, self.has_sharded_params = self._stage >= 1, self._stage >= 3
        self._gathered = frozenset[int]()  # segments that are gathered for each use
        if self.has_sharded_params:
            every = frozenset(s.index for s in layout.segments)
            self._gathered = every if self._has_peers else self._offloaded
        self._private, self._exchanged = allocator(device), exchanged or allocator(device)
        self._arena = Arena(self._exchanged)
        self._stream = CopyStream(device) if self._offloaded else None
        self._num_spare = _NUM_SPARE if is_accelerated else 0  # CPU copies are synchronous
        self._pools: list[tuple[str, BufferPool, int]] = []  # kind, pool, expected buffers
        self._pools_of = self._make_pools_for_values()
        self._views: dict[Hashable, SegmentViews] = {}
        # By segment on the device: this rank's shard, or the whole segment if kept.
        self._values = self._arena.allocate(
            "parameters",
            {
                s.index: (s.dtype, s.shard_numel if s.index in self._gathered else s.padded_numel)
                for s in layout.segments
                if s.index not in self._offloaded
            },
        )
        self.spans = layout.local_spans(is_sharded=self.has_sharded_state)
        # Memory that the state tier updates, with its start in the local flat space. A meta tensor
        # stands for a shard that the tier does not write directly (in a file, or with logged
        # changes), but through `store`.
        self.update_targets: list[tuple[int, Tensor]] = []
        self.store: ParamStore | None = None
        self.changes: ChangeLog | None = None  # for weight patches
        self._find_targets()

    def _split(self, segments: Iterable[Segment]) -> list[list[Segment]]:
        """Split segments into those of the root, the blocks and the tail, for separate pools."""
        parts: list[list[Segment]] = [[] for _ in range(2 + self._layout.has_tail)]
        for segment in segments:
            is_in_tail = segment.unit == self._layout.tail
            parts[2 if is_in_tail else min(segment.unit, 1)].append(segment)
        return parts

    def _make_pool(
        self,
        kind: str,
        allocate: Allocate,
        nbytes: Iterable[int],
        num_at_once: int,
        *,
        num_copied: int = 0,
        queue: CopyStream | None = None,
    ) -> BufferPool:
        """Make a pool for requests of ``nbytes``, of which ``num_at_once`` are lent together.

        ``num_copied``: how many buffers are copied to the host in a backward.
        """
        # More spare buffers would be unused. The root's segments are lent together and need none.
        num_spare = max(0, min(self._num_spare, num_copied - num_at_once))
        pool = BufferPool(allocate, max(nbytes, default=0), num_spare=num_spare, queue=queue)
        self._pools.append((kind, pool, num_at_once + num_spare))
        return pool

    def _make_pools_for_values(self) -> dict[int, tuple[BufferPool, BufferPool | None]]:
        """Return, by segment, the pool of gathered values, and that of fetched shards or None."""
        found: dict[int, tuple[BufferPool, BufferPool | None]] = {}
        allocate, stream = self._private, self._stream
        for part in self._split(self._layout.segments):
            plain = [s for s in part if not s.is_opaque]
            kind = "gathered units"
            filled = allocate if stream is None else stream.allocate
            nbytes = [s.padded_numel * s.dtype.itemsize for s in plain]
            at_once = _num_at_once([s for s in plain if s.index in self._gathered])
            full = self._make_pool(kind, filled, nbytes, at_once, queue=stream)
            opaque = [s for s in part if s.is_opaque]
            most = max((s.padded_numel for s in opaque), default=0)
            refilled = RefilledBuffers(self.device, most, queue=stream)
            at_once = _num_at_once([s for s in opaque if s.index in self._gathered])
            self._pools.append((kind, refilled, at_once))
            staging = None
            if stream is not None:
                fetched = [s for s in part if s.index in self._offloaded]
                nbytes = [s.shard_numel * s.dtype.itemsize for s in fetched]
                at_once = _num_of_largest_unit(fetched) if self._has_peers else 0
                staging = self._make_pool("fetched shards", allocate, nbytes, at_once, queue=stream)
            for s in part:
                found[s.index] = refilled if s.is_opaque else full, staging
        return found

    def _make_pools_for_gradients(
        self, segments: Sequence[Segment], plan_of: Mapping[int, GradientPlan]
    ) -> tuple[dict[torch.dtype, BufferPool], BufferPool, BufferPool]:
        """Return the full, shard and rounded pools."""
        plans = [(s, plan_of[s.index]) for s in segments]
        full = {}
        for dtype in {dtype for _, p in plans for dtype in (p.communicated, p.accumulated)}:
            borrowed = [
                s
                for s, p in plans
                if not (p.is_full_kept if self._has_peers else p.is_shard_kept)
                and p.communicated == dtype
            ]
            nbytes = [s.padded_numel * dtype.itemsize for s in segments]
            # On a single rank without kept gradients, the tier copies the full gradient's buffer.
            num_copied = 0 if self._has_peers else len(borrowed)
            at_once = _num_at_once(borrowed)
            full[dtype] = self._make_pool(
                "gradients under way", self._exchanged, nbytes, at_once, num_copied=num_copied
            )
        # Segments whose gradient is converted to another dtype for the tier.
        rounded = [
            s
            for s, p in plans
            if p.offered != p.accumulated and (self._has_peers or p.is_shard_kept)
        ]
        passed_on = [s for s, p in plans if self._has_peers and not p.is_shard_kept]
        is_rounded = any(s in rounded for s in passed_on)  # then the tier reads the rounded buffers
        shard_pool = self._make_pool(
            "gradient shards",
            self._exchanged,
            [s.shard_numel * p.accumulated.itemsize for s, p in plans],
            _num_of_largest_unit(passed_on),
            num_copied=0 if is_rounded else len(passed_on),
        )
        is_whole = self._stage == 0  # ranks update all elements
        numels = [s.padded_numel if is_whole else s.shard_numel for s in segments]
        rounded_pool = self._make_pool(
            "rounded gradients",
            self._private,
            [numel * p.offered.itemsize for numel, (_, p) in zip(numels, plans, strict=True)],
            _num_of_largest_unit(rounded),
            num_copied=len(rounded),
        )
        return full, shard_pool, rounded_pool

    def _find_targets(self) -> None:
        config, tier, offloaded = self._config, self._param_tier, self._offloaded
        # A split master weight includes the parameter's memory, so the tier must write that memory.
        is_split = config.zero_optimization.offload_optimizer.state_dtype != "float32"
        compared: dict[int, tuple[int, Tensor, tuple[int, int]]] = {}
        for index, (start, stop) in self.spans.items():
            segment = self._layout.segments[index]
            is_shard = stop - start == segment.shard_numel
            if index in offloaded:
                home = None if tier is None else tier.home(index)
                meta = torch.empty(segment.shard_numel, dtype=segment.dtype, device="meta")
                target = meta if home is None else home
            else:
                target = self._shard(segment) if is_shard else self._values[index]
            is_apart = segment.dtype.itemsize == 2 and segment.dtype not in config.own_masters
            if config.weight_patches and is_apart and not (is_split or target.is_meta):
                own = (0, segment.shard_numel) if is_shard else segment.shard_range(self._rank)
                compared[index] = start, target, own
                target = torch.empty_like(target, device="meta")
            self.update_targets.append((start, target))
        if tier is not None:
            spans = [(span[0], i) for i, span in self.spans.items() if i in offloaded]
            self.store = LocalStore(tier, spans)
        settings = config.weight_patches
        if settings is not None and self.device.type != "meta":
            self.store = self.changes = ChangeLog(
                compared,
                sorted((span[0], index) for index, span in self.spans.items()),
                self.store,
                num_versions=settings.versions,
                max_bytes=settings.max_bytes,
            )

    def _shard(self, segment: Segment) -> Tensor:
        values = self._values[segment.index]
        if segment.index in self._gathered:
            return values
        return values[slice(*segment.shard_range(self._rank))]

    def make_units(
        self,
        tier: StateTier,
        communicator: Communicator,
        arithmetic: Arithmetic,
        *,
        has_own_tier: bool,
    ) -> list[Unit]:
        """Allocate gradients, and build the units. ``has_own_tier``: the user passed ``tier``."""
        segments, zero = self._layout.segments, self._config.zero_optimization
        has_masters = has_own_tier or zero.offload_optimizer.device != "none"
        # The engine's own tiers have updated a shard on the device when ``step`` returns.
        awaited = tier if has_masters or self._offloaded else None
        params = [
            self._flat_params(s, communicator, awaited, has_masters=has_masters) for s in segments
        ]
        adds_grads = isinstance(tier, AccumulatingTier)
        buffers = self.allocate_gradients(owns_grads=tier.owns_grads, adds_grads=adds_grads)
        if isinstance(tier, AccumulatingTier) and any(
            of_segment.plan.is_passed_on_each for of_segment in buffers.values()
        ):
            tier.expect_micro_steps(self._config.gradient_accumulation_steps)
        grads = {
            index: arithmetic.grads_class(
                segments[index],
                [p for p in params[index].params if isinstance(p, nn.Parameter)],
                of_segment,
                communicator,
                tier,
                self.spans[index],
                self._views_of(segments[index]),
                arithmetic,
            )
            for index, of_segment in buffers.items()
        }
        hints = None
        if self._param_tier is not None:
            offloaded = [
                [params[s.index] for s in unit.segments if s.index in self._offloaded]
                for unit in self._layout.units
            ]
            hints = PrefetchHints(self._param_tier, offloaded, self._layout.last_block)
        return [
            Unit(
                unit.index,
                unit.name,
                [params[s.index] for s in unit.segments],
                [grads[s.index] for s in unit.segments if s.is_trainable],
                hints,
                is_tail=unit.index == self._layout.tail,
            )
            for unit in self._layout.units
        ]

    def _flat_params(
        self,
        segment: Segment,
        communicator: Communicator,
        tier: StateTier | None,
        *,
        has_masters: bool,
    ) -> FlatParams:
        index, span = segment.index, self.spans.get(segment.index)
        pool, staging = self._pools_of[index]
        source: Shard
        if index in self._offloaded:
            param_tier, stream = self._param_tier, self._stream
            assert param_tier is not None
            assert stream is not None
            assert staging is not None
            source = OffloadedShard(segment, param_tier, stream, staging, communicator, tier, span)
        else:
            source = Shard(segment, self._shard(segment), communicator, tier, span)
        params = [self._found.params[slot.param] for slot in segment.slots]
        here = set(map(id, params))
        shown = ShownParams(
            params,
            self._views_of(segment),
            [self._layout.params[slot.param].name for slot in segment.slots],
            [q for q in self._found.quantized if not here.isdisjoint(map(id, q.components))],
            rank=self._rank,
            has_masters_apart=has_masters or segment.dtype not in self._config.own_masters,
        )
        return FlatParams(
            segment,
            shown,
            rank=self._rank,
            device=self.device,
            source=source,
            kept=None if index in self._gathered else self._values[index],
            pool=pool,
            has_remote_updates=segment.is_trainable
            and self.has_sharded_state
            and self._layout.world_size > 1,
        )

    def _views_of(self, segment: Segment) -> SegmentViews:
        specs = [self._layout.params[slot.param] for slot in segment.slots]
        slots = [
            (slot.start, slot.stop, spec.shape, spec.order)
            for slot, spec in zip(segment.slots, specs, strict=True)
        ]
        key = segment.index if segment.is_opaque else (segment.dtype, segment.padded_numel, *slots)
        if key not in self._views:
            self._views[key] = SegmentViews(segment, specs, self.device)
        return self._views[key]

    def allocate_gradients(
        self, *, owns_grads: bool, adds_grads: bool
    ) -> dict[int, GradientBuffers]:
        """Allocate the gradient buffers of each trainable segment.

        A tier that copies gradients (``owns_grads``) needs no kept gradient shards, unless
        gradients accumulate over micro-steps and the tier cannot add them (``adds_grads`` false).
        """
        plan_of = {
            s.index: plan_gradient(
                s, self._config, stage=self._stage, owns_grads=owns_grads, adds_grads=adds_grads
            )
            for s in self._layout.segments
            if s.is_trainable
        }
        plans = [(self._layout.segments[index], plan) for index, plan in plan_of.items()]
        allocate = self._arena.allocate
        full = allocate(
            "gradients",
            {s.index: (p.communicated, s.padded_numel) for s, p in plans if p.is_full_kept},
        )
        # Sums that overwrite the unreduced gradients, in the same memory.
        total = {s.index: full[s.index] for s, p in plans if p.is_sum_in_full}
        shards: dict[int, Tensor] = {}
        if self._layout.world_size > 1 and self._stage == 0:
            rest = [(s, p) for s, p in plans if s.index not in total]
            sums = {s.index: (p.accumulated, s.padded_numel) for s, p in rest}
            total |= allocate("gradients", sums)
            # This rank's slice of the gathered sum is also the reduction's output.
            shards = {s.index: total[s.index][slice(*s.shard_range(self._rank))] for s, _ in rest}
        kept = [(s, p) for s, p in plans if p.is_shard_kept and s.index not in shards]
        reduced = {s.index: (p.accumulated, s.shard_numel) for s, p in kept}
        shards |= allocate("gradient shards", reduced)
        # Reduced gradients that are added to those of earlier micro-steps. Only one unit's
        # reductions are pending at a time.
        added = [s for s, p in plans if p.is_shard_kept and not p.is_sequential]
        is_added = self._has_peers and self._config.gradient_accumulation_steps > 1
        nbytes = [s.shard_numel * p.accumulated.itemsize for s, p in plans]
        at_once = _num_of_largest_unit(added) if is_added else 0
        terms = self._make_pool("gradient shards", self._private, nbytes, at_once)
        found = {}
        for part in self._split(s for s, _ in plans):
            pools = self._make_pools_for_gradients(part, plan_of)
            for s in part:
                of_segment = full.get(s.index), shards.get(s.index), total.get(s.index)
                found[s.index] = GradientBuffers(plan_of[s.index], *of_segment, *pools, terms)
        return found

    def reserve_buffers(self) -> None:
        """Allocate all buffers that steps borrow, because later allocations fragment memory."""
        for _, pool, expected in self._pools:
            pool.reserve(expected)

    def free_buffers(self, *, keeps_expected: bool = False) -> None:
        """Free all unused buffers, or (``keeps_expected``) those beyond `reserve_buffers`."""
        for _, pool, expected in self._pools:
            pool.free(keep=expected if keeps_expected else 0)

    def expected_blocks(self) -> dict[str, list[int]]:
        """Return the bytes of each allocation, by kind, for steps in the module tree's order."""
        found = {kind: [b.nbytes for b in buffers] for kind, buffers in self._arena.buffers.items()}
        for kind, pool, expected in self._pools:
            found.setdefault(kind, []).extend([pool.buffer_bytes] * expected)
        return found

    def report(self) -> dict[str, int]:
        """Return the bytes of each kind on this rank, without those of the state tier."""
        found = self._arena.report()
        for kind, pool, _ in self._pools:
            found[kind] = found.get(kind, 0) + pool.allocated_bytes
        if self.changes is not None:
            found["weight patches"] = self.changes.nbytes
        return found if self._param_tier is None else {**found, **self._param_tier.report()}

    def device_tensors(self) -> dict[str, list[Tensor]]:
        found: dict[str, list[Tensor]] = {"parameters": [], "gradients": []}
        for kind, buffers in self._arena.buffers.items():
            found["parameters" if kind == "parameters" else "gradients"] += buffers
        return found

    def forget_views(self) -> None:
        """Drop views cached by address, after buffers were moved or freed."""
        for views in self._views.values():
            views.forget()


def _num_of_largest_unit(segments: Sequence[Segment]) -> int:
    return max(Counter(s.unit for s in segments).values(), default=0)


def _num_at_once(segments: Sequence[Segment]) -> int:
    """Return the largest number of segments in two consecutive units, or in the only unit."""
    counts = list(Counter(s.unit for s in segments).values())
    return max(map(sum, pairwise(counts)), default=sum(counts))
