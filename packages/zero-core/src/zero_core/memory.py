"""Everything that an engine allocates for itself, once: see zero_core.arena for the two kinds.

On the meta device the same code allocates nothing and still knows every size: that is how
`zero_core.plan` counts bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from zero_core.arena import Allocate, Arena, BufferPool, allocator
from zero_core.config import DTYPES, Config
from zero_core.discovery import Discovered
from zero_core.layout import Layout, Segment
from zero_core.resting import Lane, LocalStore, Outlook, Resting, RestingShard
from zero_core.segment_grads import SegmentGrads
from zero_core.segment_values import SegmentValues
from zero_core.unit import Unit

__all__ = ["Memory", "accumulated_dtype", "communicated_dtype", "offered_dtype"]

ReadGrad = Callable[[int, int], Tensor]
"""`zero_core.protocols.StateTier.read_grad`."""
NUM_SPARE = 2
"""Buffers whose copies to the host may still be under way when the next one is needed."""


class Memory:
    """Everything that is allocated, once: see zero_core.arena."""

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
        resting: Resting | None = None,
    ) -> None:
        """Allocate values for ``rank`` on ``device``; the model's parameters stay as they are.

        `allocate_grads` does the rest. ``exchanged`` makes the memory that other ranks' bytes are
        read from (shards and gradients), if it is to be of a special kind. ``is_accelerated``:
        the compute device is another one than the host. ``resting`` is what rests off the device,
        if anything.
        """
        self._has_peers = layout.world_size > 1
        self._resting = () if resting is None else resting.segments
        self._at_rest = frozenset(s.index for s in self._resting)
        self._tier = None if resting is None else resting.tier
        has_stage = self._has_peers or bool(self._resting)
        self.stage = config.zero_optimization.stage if has_stage else 0
        """The stage that makes a difference: one rank has nothing to shard, but may stream."""
        self.has_sharded_state = self.stage >= 1
        self._keeps_full_grads = self._has_peers and self.stage < 2
        self._has_full_update = self._has_peers and self.stage == 0
        self.has_sharded_params = self.stage >= 3
        self._config = config
        self._rank = rank
        self._device = device
        self._lane = Lane(device if self._resting else torch.device("cpu"))
        self._private = allocator(device)
        self._exchanged = exchanged or self._private
        self._arena = Arena(self._exchanged)
        self._found = found
        self._layout = layout
        self._pools: list[tuple[str, BufferPool, int]] = []
        # Copies to other memory are under way on an accelerator while the next unit is reduced.
        self._num_spare = NUM_SPARE if is_accelerated else 0
        self.values = values = self._allocate_values()
        self.units: list[Unit] = []
        starts = layout.local_starts(is_sharded=self.has_sharded_state)
        for index, start in starts.items():
            low, high = layout.state_range(
                layout.segments[index], rank, is_sharded=self.has_sharded_state
            )
            values[index].local_span = (start, start + high - low)

    def allocate_grads(self, read_grad: ReadGrad | None) -> None:
        """Allocate what gradients need, and make the units.

        ``read_grad`` is that of a state tier that keeps gradients
        (`zero_core.protocols.StateTier`). Then they are not kept here, unless they have to add up
        over micro-steps.
        """
        grads = self._allocate_grads(read_grad)
        outlook = self._outlook()
        self.units = [
            Unit(
                unit.index,
                unit.name,
                [self.values[s.index] for s in unit.segments],
                [grads[s.index] for s in unit.segments if s.is_trainable],
                outlook,
            )
            for unit in self._layout.units
        ]

    def published(self) -> list[tuple[int, Tensor]]:
        """Where the state tier writes new values, by start in the local flat space."""
        return [(v.local_span[0], v.published()) for v in self.values if v.local_span is not None]

    def store(self) -> LocalStore | None:
        """What takes the new values of shards that rest; None if there are none."""
        if self._tier is None:
            return None
        spans = [
            (v.local_span[0], v.segment.index)
            for v in self.values
            if v.local_span is not None and v.segment.index in self._at_rest
        ]
        return LocalStore(self._tier, spans)

    def _outlook(self) -> Outlook | None:
        if self._tier is None:
            return None
        units = self._layout.units
        rest = [[s.index for s in u.segments if s.index in self._at_rest] for u in units]
        return Outlook(self._tier, rest)

    def report(self) -> dict[str, int]:
        """Bytes by kind, on this rank, state tier not counted."""
        found = self._report(lambda pool, expected: pool.allocated_bytes)
        return found if self._tier is None else {**found, **self._tier.report()}

    def expected_report(self) -> dict[str, int]:
        """What `report` says after steps in which units ran in the order of the module tree.

        Two units are there at once: one in use and the next one arriving, or one whose gradients
        come in and the last one under reduction. The root's segments are there all the time.
        """
        return self._report(lambda pool, expected: expected * pool.buffer_bytes)

    def _report(self, nbytes: Callable[[BufferPool, int], int]) -> dict[str, int]:
        report = self._arena.report()
        for kind, pool, expected in self._pools:
            report[kind] = report.get(kind, 0) + nbytes(pool, expected)
        return report

    def _params_of(self, segment: Segment) -> list[nn.Parameter]:
        return [self._found.params[slot.param] for slot in segment.slots]

    def _pool(
        self,
        kind: str,
        nbytes: Sequence[int],
        users: Sequence[Segment],
        allocate: Allocate,
        *,
        num_spare: int = 0,
    ) -> BufferPool:
        """A pool for requests of ``nbytes``, of which ``users`` are going to make some."""
        pool = BufferPool(allocate, max(nbytes, default=0), num_spare=num_spare)
        self._pools.append((kind, pool, _num_at_once(users) + num_spare * bool(users)))
        return pool

    def _split(self, segments: Sequence[Segment]) -> list[list[Segment]]:
        """Segments of the root and of the blocks: their buffers live differently long."""
        return [[s for s in segments if s.unit == 0], [s for s in segments if s.unit != 0]]

    def _is_gathered(self, segment: Segment) -> bool:
        """Whether the segment's values are gathered for each use, and not kept for good."""
        is_whole = not self._has_peers and segment.index not in self._at_rest
        return self.has_sharded_params and not is_whole

    def _allocate_values(self) -> list[SegmentValues]:
        segments = self._layout.segments
        shards: dict[int, Tensor | RestingShard] = {**self._rest()}
        fulls: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(s.dtype for s in segments):
            same = [s for s in segments if s.dtype == dtype and s.index not in shards]
            if not same:
                continue
            sizes = [s.shard_numel if self._is_gathered(s) else s.padded_numel for s in same]
            parts = self._arena.allocate("parameters", dtype, sizes)
            for s, t in zip(same, parts, strict=True):
                if self._is_gathered(s):
                    shards[s.index] = t
                else:
                    shards[s.index], fulls[s.index] = t[slice(*s.shard_range(self._rank))], t
        pools = [
            self._pool(
                "gathered units",
                [s.padded_numel * s.dtype.itemsize for s in part],
                [s for s in part if self._is_gathered(s)],
                self._lane.filled_by(self._private),
            )
            for part in self._split(segments)
        ]
        return [
            SegmentValues(
                s,
                self._params_of(s),
                rank=self._rank,
                device=self._device,
                shard=shards[s.index],
                full=fulls.get(s.index),
                pool=pools[min(s.unit, 1)],
                lane=self._lane,
                has_remote_updates=self._has_peers and self.has_sharded_state and s.is_trainable,
            )
            for s in segments
        ]

    def _rest(self) -> dict[int, RestingShard]:
        """The shards that rest off the device, and what they arrive in to be gathered."""
        tier = self._tier
        if tier is None:
            return {}
        pools = [
            self._pool(
                "fetched shards",
                [s.shard_numel * s.dtype.itemsize for s in part],
                _largest_unit(part) if self._has_peers else [],
                self._private,
            )
            for part in self._split(self._resting)
        ]
        return {
            s.index: RestingShard(s, tier, self._lane, staging=pools[min(s.unit, 1)])
            for s in self._resting
        }

    def _allocate_grads(self, read_grad: ReadGrad | None) -> dict[int, SegmentGrads]:
        segments = [s for s in self._layout.segments if s.is_trainable]
        adds_up = self._config.gradient_accumulation_steps > 1
        has_keeper = read_grad is not None
        is_passing = has_keeper and not adds_up and not self._has_full_update
        kept: dict[int, Tensor] = {}
        final: dict[int, Tensor] = {}
        shards: dict[int, Tensor] = {}
        if self._keeps_full_grads:
            kept = self._by_dtype("gradients", segments, self._communicated, is_full=True)
        if self._has_full_update:
            # A reduction leaves the kept gradients free: they hold the sum, if it fits.
            final = {s.index: kept[s.index] for s in segments if self._is_sum_kept(s)}
            rest = [s for s in segments if s.index not in final]
            own = self._by_dtype("gradients", rest, self._accumulated, is_full=True)
            # The sum that is gathered into begins as this rank's slice of it.
            shards = {s.index: own[s.index][slice(*s.shard_range(self._rank))] for s in rest}
            final |= own
        apart = [s for s in segments if s.index not in shards and not is_passing]
        shards |= self._by_dtype("gradient shards", apart, self._accumulated, is_full=False)
        is_alone = is_passing and not self._has_peers  # the only buffer is what the tier reads
        dtypes = {self._communicated(s) for s in segments} | {
            self._accumulated(s) for s in segments
        }
        pools = [
            {
                dtype: self._pool(
                    "gradients under way",
                    [s.padded_numel * dtype.itemsize for s in part],
                    [s for s in part if self._is_pooled(s, dtype, is_passing=is_passing)],
                    self._exchanged,
                    num_spare=self._num_spare if is_alone else 0,
                )
                for dtype in dtypes
            }
            for part in self._split(segments)
        ]
        shard_pools = [
            self._pool(
                "gradient shards",
                [s.shard_numel * self._accumulated(s).itemsize for s in part],
                _largest_unit(part) if is_passing and self._has_peers else [],
                self._exchanged,
                num_spare=self._num_spare,
            )
            for part in self._split(segments)
        ]
        return {
            s.index: SegmentGrads(
                s,
                self._params_of(s),
                grad_shard=shards.get(s.index),
                kept_full_grad=kept.get(s.index),
                final_grad=final.get(s.index),
                pools=pools[min(s.unit, 1)],
                shard_pool=shard_pools[min(s.unit, 1)],
                is_summed=self._config.gradient_allreduce_op == "sum",
                communication_dtype=self._communicated(s),
                accumulation_dtype=self._accumulated(s),
                offered_dtype=offered_dtype(s, self._config, has_keeper=has_keeper),
                read_offered=None if read_grad is None else self._reader(s, read_grad),
            )
            for s in segments
        }

    def _reader(self, segment: Segment, read_grad: ReadGrad) -> Callable[[], Tensor]:
        span = self.values[segment.index].local_span
        assert span is not None
        return lambda: read_grad(*span).to(self._device)

    def _by_dtype(
        self,
        kind: str,
        segments: Sequence[Segment],
        dtype_of: Callable[[Segment], torch.dtype],
        *,
        is_full: bool,
    ) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(dtype_of(s) for s in segments):
            same = [s for s in segments if dtype_of(s) == dtype]
            sizes = [s.padded_numel if is_full else s.shard_numel for s in same]
            for s, t in zip(same, self._arena.allocate(kind, dtype, sizes), strict=True):
                found[s.index] = t
        return found

    def _is_pooled(self, segment: Segment, dtype: torch.dtype, *, is_passing: bool) -> bool:
        """Whether each backward takes a buffer of ``dtype`` for the segment's gradients."""
        is_pooled = not self._keeps_full_grads if self._has_peers else is_passing
        return is_pooled and self._communicated(segment) == dtype

    def _is_sum_kept(self, segment: Segment) -> bool:
        return self._communicated(segment) == self._accumulated(segment)

    def _communicated(self, segment: Segment) -> torch.dtype:
        return communicated_dtype(segment, self._config)

    def _accumulated(self, segment: Segment) -> torch.dtype:
        return accumulated_dtype(segment, self._config)


def communicated_dtype(segment: Segment, config: Config) -> torch.dtype:
    """What the segment's gradients are reduced in."""
    name = config.communication_data_type
    return segment.dtype if name is None else DTYPES[name]


def accumulated_dtype(segment: Segment, config: Config) -> torch.dtype:
    """What the segment's reduced gradients add up in."""
    name = config.data_types.grad_accum_dtype
    if name is not None:
        return DTYPES[name]
    return torch.float64 if segment.dtype == torch.float64 else torch.float32


def offered_dtype(segment: Segment, config: Config, *, has_keeper: bool) -> torch.dtype:
    """What the state tier gets the segment's gradients in; if it keeps them, as they travelled."""
    of = communicated_dtype if has_keeper else accumulated_dtype
    return of(segment, config)


def _largest_unit(segments: Sequence[Segment]) -> list[Segment]:
    """The segments of the unit that has the most of them."""
    by_unit: dict[int, list[Segment]] = {}
    for segment in segments:
        by_unit.setdefault(segment.unit, []).append(segment)
    return max(by_unit.values(), key=len, default=[])


def _num_at_once(segments: Sequence[Segment]) -> int:
    """Most segments of two units that follow each other; of the one unit, if there is but one."""
    counts = list(Counter(s.unit for s in segments).values())
    return max(map(sum, pairwise(counts)), default=sum(counts))
