"""Memory of a configuration, worked out on the meta device.

[Note: where the numbers come from]
Parameters, gradients and pools: `zero_core.sharded.memory` itself, run on the meta device. Master
weights and states on the device: the rules of `zero_core.optim.device_tier` over the same layout,
with the states that the optimizer makes in a step on two elements; what whole parameters take in a
step: `zero_core.optim.whole_tier`. Offloaded state, offloaded parameters and quantized collectives:
the closed forms of the packages that serve them; see `zero_core.footprint.footprints`. Activations:
`zero_core.footprint.activations`.

All byte counts are per rank. The rank planned for is rank 0; all ranks are alike but for padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from zero_core.blueprint import Blueprint
from zero_core.comm.fused_sum import sum_dtype
from zero_core.comm.host import coded_room
from zero_core.comm.meter import Links
from zero_core.config import Config
from zero_core.footprint.footprints import (
    CollectivesFootprint,
    Footprints,
    ParamFootprintFactory,
    TierFootprint,
    TierFootprintFactory,
    UploadFootprint,
    learning_rate,
)
from zero_core.layout.arithmetic import Layout, Segment
from zero_core.layout.gradient_plan import accumulated_dtype, communicated_dtype
from zero_core.optim.device_tier import TURN_NUMEL, optimizer_maker, probe_states, widened_numel
from zero_core.optim.factory import has_kernel_rule
from zero_core.optim.whole_tier import step_bytes
from zero_core.plugins import call_factory
from zero_core.runtime.host_inputs import MAX_IN_PIECE, page_locked_bytes
from zero_core.sharded.memory import Memory
from zero_core.sharded.param_offload import OffloadedSegments, offloaded_segments
from zero_core.step.update import may_speculate

_META = torch.device("meta")
_WHOLES = "whole parameters in a step"


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one rank by kind, on the compute device, and of host memory besides."""

    device: Mapping[str, int]
    host: Mapping[str, int] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


@dataclass(frozen=True)
class _WholeFootprint(TierFootprint):
    """Bytes of `zero_core.optim.whole_tier` on the host."""

    on_host: dict[str, int]
    on_device: dict[str, int]
    moved: tuple[int, int]

    def host_bytes(self, ratio: float) -> dict[str, int]:
        return self.on_host

    def device_bytes(self, ratio: float) -> dict[str, int]:
        return self.on_device

    def link_bytes(self, ratio: float) -> tuple[int, int]:
        return self.moved


class Forecast:
    """One configuration's bytes per rank, for any ratio of its optimizer state on the host."""

    def __init__(
        self,
        drawn: Blueprint,
        config: Config,
        footprints: Footprints,
        links: Links,
        buffer_bytes: int,
    ) -> None:
        """Compute every size. ``buffer_bytes`` are those of the model's own buffers."""
        self._layout = layout = drawn.layout
        self._config = config
        self._links = links
        self._footprints = footprints
        is_accelerated = links.is_ring  # then the compute device is another one than the host
        zero = config.zero_optimization
        kind = zero.offload_param.device
        is_apart = kind == "nvme" or (kind == "cpu" and is_accelerated)
        self.resting = offloaded_segments(layout, config, is_apart=is_apart)
        is_offloaded = zero.offload_optimizer.device != "none"
        memory = Memory(
            drawn.found,
            layout,
            config,
            rank=0,
            device=_META,
            is_accelerated=is_accelerated,
            offloaded=OffloadedSegments(self.resting, None) if self.resting else None,
        )
        owns_grads = is_offloaded and drawn.updates_slices
        buffers = memory.allocate_gradients(owns_grads=owns_grads, adds_grads=owns_grads)
        # how the gradient of each trainable segment is held, by its index
        self.gradients = {index: held.plan for index, held in buffers.items()}
        self._numel = layout.local_numel(is_sharded=memory.has_sharded_state)
        # ``(start, stop, segment)`` of each segment in what this rank updates
        self.spans = [(*span, layout.segments[index]) for index, span in memory.spans.items()]
        self._whole_bytes: tuple[int, int] | None = None  # of a step, where it is; its messages
        if not drawn.updates_slices:
            self._whole_bytes = step_bytes(
                layout,
                is_sharded=memory.has_sharded_state,
                is_apart=is_offloaded and is_accelerated,
                sliced=drawn.sliced_params,
                dtypes={
                    s.index: (config.master_dtype(s.dtype), self.gradients[s.index].offered)
                    for _, _, s in self.spans
                },
            )
        make = optimizer_maker(type(drawn.optimizer), drawn.groups)
        shape = (2,) if drawn.updates_slices else (2, 2)  # a matrix has factored states
        updated = config.master_dtype(torch.bfloat16)
        states = probe_states(make, drawn.groups, torch.device("cpu"), updated, shape)
        self._state_bytes = sum(dtype.itemsize for dtype in states.values())
        self.collectives = footprints.collectives(config, links)
        # gradients of each element that the tier adds up in a step
        is_each = any(plan.is_passed_on_each for plan in self.gradients.values())
        self.num_added = config.gradient_accumulation_steps if is_each else 1
        self.tier = self._tier_footprint(drawn, memory) if is_offloaded else None
        # the most host memory of `Engine.async_save`: this rank's states once
        self.async_save_bytes = sum(
            s.shard_numel * (config.master_dtype(s.dtype).itemsize + self._state_bytes)
            for *_, s in self.spans
        )
        # whether every package that the configuration asks for is installed
        self.is_complete = self.collectives is not None or zero.quantized_key is None
        self.is_complete &= self.tier is not None or not is_offloaded
        resting: dict[str, int] = {}
        if self.resting:
            asked = f"zero_optimization.offload_param.device = {kind!r}"
            find: ParamFootprintFactory | None
            find = footprints.load("param_tier", asked, "zero-offload")
            self.is_complete &= find is not None
            if find is not None:
                shards = [(s.index, s.shard_numel, s.dtype) for s in self.resting]
                resting = find(shards=shards, config=zero.model_dump(mode="json"))
        root = {slot.param for s in layout.units[0].segments for slot in s.slots}
        # bytes of a micro-batch's gradient of each weight of the root that is tied, whose last part
        # ends a vertical backward. Empty for other schedules
        self.tied = [
            p.numel * p.dtype.itemsize
            for n, p in enumerate(layout.params)
            if config.is_vertical and p.is_trainable and p.aliases and n in root
        ]
        steps = config.gradient_accumulation_steps
        are_tied_moved = config.has_inputs_on_host and is_accelerated
        copies = patches = 0
        if config.memory_checkpoint is not None:  # two slots, of this rank and of another one
            frozen = (s for s in layout.segments if not s.is_trainable)
            kept = self.async_save_bytes + sum(s.shard_numel * s.dtype.itemsize for s in frozen)
            has_nodes = links.num_nodes > 1
            copies = 2 * kept * (1 + config.memory_checkpoint.copies * has_nodes)
        if (wanted := config.weight_patches) is not None:  # at most: positions of changed values
            numel = sum(s.shard_numel for *_, s in self.spans if s.dtype.itemsize == 2)
            being_made, most = numel // 4, wanted.versions * numel * 5 // 32
            patches = being_made + min(most, most if wanted.max_bytes is None else wanted.max_bytes)
        self._fixed_on_host = {
            **resting,
            "copies in memory": copies,
            "weight patches": patches,
            "gradients of tied weights": sum(
                page_locked_bytes(nbytes, number * steps, min(steps, MAX_IN_PIECE))
                for nbytes, number in Counter(self.tied if are_tied_moved else []).items()
            ),
        }
        # A unit's shards of a micro-step, before they are added to earlier ones.
        further: Counter[int] = Counter()
        for s in layout.segments if layout.world_size > 1 and steps > 1 else ():
            plan = self.gradients.get(s.index)
            if plan is not None and plan.is_shard_kept and not plan.is_sequential:
                further[s.unit] += s.shard_numel * accumulated_dtype(s, config).itemsize
        self._fixed = {
            **memory.report(is_expected=True),
            "exchange buffers": self._exchange_bytes(),
            "micro-step gradient": max(further.values(), default=0),
            # Autograd's, before it joins its unit's.
            "parameter gradient": max(
                (p.numel * p.dtype.itemsize for p in layout.params if p.is_trainable), default=0
            ),
            "gradients of tied weights": (2 if are_tied_moved else steps) * sum(self.tied),
            # Buffers grow to the longest message there has been.
            **collectives_memory(
                footprints.collectives(config, links, is_worst_case=True), layout, config
            ),
            "model buffers": buffer_bytes,
        }

    def _tier_footprint(self, drawn: Blueprint, memory: Memory) -> TierFootprint | None:
        """Return the footprint of the tier on the host, None without its package."""
        if self._whole_bytes is not None:
            kept = self._own_tier_bytes(0, self._numel)
            down = up = 0
            for low, stop, segment in self.spans:
                numel, is_resting = stop - low, segment in self.resting
                is_own = segment.dtype == self._config.master_dtype(segment.dtype)
                if self._links.is_ring and is_own and not is_resting:
                    kept["master weights"] += numel * segment.dtype.itemsize
                down += numel * self.gradients[segment.index].offered.itemsize
                up += 0 if is_resting else numel * segment.dtype.itemsize
            on_device = {_WHOLES: self._whole_bytes[1] * self._links.is_ring}
            return _WholeFootprint({k: n for k, n in kept.items() if n}, on_device, (down, up))
        zero = self._config.zero_optimization
        asked = f"zero_optimization.offload_optimizer.device = {zero.offload_optimizer.device!r}"
        make: TierFootprintFactory | None
        make = self._footprints.load("state_tier", asked, "zero-offload")
        if make is None:
            return None
        pieces = drawn.layout.pieces(0, is_sharded=memory.has_sharded_state)
        segments = [segment for _, _, segment in self.spans]
        made: TierFootprint = call_factory(
            make,
            numel=self._numel,
            pieces=[(p.start, p.stop, drawn.group_of[p.param]) for p in pieces],
            params=[
                (start, torch.empty(stop - start, dtype=segment.dtype, device=_META))
                for start, stop, segment in self.spans
            ],
            grad_dtypes=[self.gradients[s.index].offered for s in segments],
            num_added=self.num_added,
            resting={i for i, segment in enumerate(segments) if segment in self.resting},
            is_accelerated=self._links.is_ring,
            optimizer_class=type(drawn.optimizer),
            groups=drawn.groups,
            config=zero.model_dump(mode="json"),
            has_kernel=has_kernel_rule(self._config, drawn.given),
            is_speculative=may_speculate(self._config),
        )
        return made

    def memory(self, ratio: float) -> MemoryUse:
        """Return the bytes with the first ``ratio`` of states on the host: see `is_complete`."""
        host: dict[str, int] = {}
        kept = {"master weights": 0, "optimizer states": 0}  # in this order
        if self.tier is not None:
            if self._links.is_ring and self._whole_bytes is None:
                kept |= self._own_tier_bytes(*self.tier.device_span(ratio))
            kept |= self.tier.device_bytes(ratio)
            host = self.tier.host_bytes(ratio)
        elif self._config.zero_optimization.offload_optimizer.device == "none":
            kept |= self._own_tier_bytes(0, self._numel)
        by_place = {**self._fixed, **kept}, {**host, **self._fixed_on_host}
        return MemoryUse(*({k: n for k, n in kinds.items() if n} for kinds in by_place))

    def _own_tier_bytes(self, start: int, stop: int) -> dict[str, int]:
        """Return the bytes of the engine's own tier over ``[start, stop)``."""
        masters = 0
        sizes: dict[torch.dtype, list[int]] = {}  # elements of the parts, by their masters' dtype
        has_narrow: set[torch.dtype] = set()  # dtypes to which gradients are widened
        for low, high, segment in self.spans:
            numel = min(high, stop) - max(low, start)
            if numel <= 0:
                continue
            master = self._config.master_dtype(segment.dtype)
            if segment.dtype != master or segment in self.resting:
                masters += numel * master.itemsize
            sizes.setdefault(master, []).append(numel)
            plan = self.gradients[segment.index]  # a sum of micro-steps is in the master's dtype
            if plan.offered != master and not plan.is_passed_on_each:
                has_narrow.add(master)
        states = (stop - start) * self._state_bytes
        kept = {"master weights": masters, "optimizer states": states}
        if self._whole_bytes is not None:
            return {**kept, _WHOLES: sum(self._whole_bytes)}
        widened = (min(widened_numel(sizes[d]), TURN_NUMEL) * d.itemsize for d in has_narrow)
        return {**kept, "widened gradients": sum(widened)}

    def host_link_bytes(self, ratio: float) -> tuple[int, int]:
        """Return the bytes per step from the device to the host and back.

        To the host: gradients, and new values of parameters that rest there. Back: new values, and
        resting shards as often as they are gathered.
        """
        config, updated = self._config, (span for span in self.spans if span[2] in self.resting)
        up = sum(
            s.shard_numel * s.dtype.itemsize * num_gathers(s, self._layout, config)
            for s in self.resting
        )
        if self.tier is None:
            return sum((stop - low) * s.dtype.itemsize for low, stop, s in updated), up
        down, new = self.tier.link_bytes(ratio)
        if config.zero_optimization.offload_optimizer.lossless_upload:
            asked = "zero_optimization.offload_optimizer.lossless_upload"
            find: UploadFootprint | None = self._footprints.load("uploads", asked, "zero-comm")
            if find is not None:
                rate, sizes = learning_rate(config), self.tier.uploaded_numel(ratio).items()
                sent = (find(numel=n, dtype=dtype, learning_rate=rate) for dtype, n in sizes)
                new = min(new, sum(sent))
        return down, up + new

    def _exchange_bytes(self) -> int:
        """Return the bytes of the buffers that reductions receive into.

        On accelerators reductions run one by one and share one buffer. On hosts a unit's run at
        once, and buffers are kept by size. Messages of coded gradients are sent one unit at a time.
        """
        links, footprint = self._links, self.collectives
        has_shared_memory = links.num_nodes == 1 and not self._links.is_ring
        if links.world_size == 1 or has_shared_memory:
            return 0
        num_messages = links.world_size - links.ranks_per_node
        if links.sums_in_two_levels:
            num_messages = links.num_nodes - 1
        slices: Counter[tuple[int, torch.dtype]] = Counter()
        messages: Counter[int] = Counter()  # of coded gradients, each way
        for unit in self._layout.units:
            of_unit: Counter[tuple[int, torch.dtype]] = Counter()
            coded: Counter[int] = Counter()
            for s in unit.segments:
                numel, dtype = s.shard_numel, communicated_dtype(s, self._config)
                is_here = footprint is None or footprint.reduction(numel, dtype) is None
                if not (s.is_trainable and is_here):
                    continue
                of_unit[s.padded_numel, dtype] += 1
                if footprint is not None and links.codes_slices:
                    sent = sum_dtype(dtype) if links.sums_in_two_levels else dtype
                    sizes = footprint.coded_nbytes(numel, sent)
                    if sizes is not None:
                        coded[num_messages * coded_room(sizes[1])] += 1
            slices |= of_unit
            messages |= coded
        if self._links.is_ring:
            largest = max((numel * dtype.itemsize for numel, dtype in slices), default=0)
            return largest + 2 * max(messages, default=0)
        held = sum(n * numel * dtype.itemsize for (numel, dtype), n in slices.items())
        return held + 2 * sum(n * nbytes for nbytes, n in messages.items())


def num_gathers(segment: Segment, layout: Layout, config: Config) -> int:
    """Return how often the segment's parameters are gathered in one optimizer step."""
    stage = config.zero_optimization.stage
    if stage < 3:  # after an update of other ranks' slices
        return int(stage > 0 and segment.is_trainable)
    # The root and the tail stay, and backward begins with the last block.
    is_once = segment.unit == 0 or segment.unit >= layout.last_block
    passes = 1 if config.is_vertical else config.gradient_accumulation_steps
    return passes * (1 if is_once else 2)


def collectives_memory(
    footprint: CollectivesFootprint | None, layout: Layout, config: Config
) -> dict[str, int]:
    """Return the bytes that quantized collectives keep by kind, none without ``footprint``."""
    if footprint is None:
        return {}
    segments = layout.segments
    return footprint.memory(
        [(s.shard_numel, s.dtype, s.is_trainable) for s in segments],
        [
            (s.shard_numel, communicated_dtype(s, config), accumulated_dtype(s, config))
            for s in segments
            if s.is_trainable
        ],
    )
