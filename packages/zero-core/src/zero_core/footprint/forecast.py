"""Memory and traffic of a configuration, computed on the meta device.

[Note: where the numbers come from]
Parameters, gradients and pools: `zero_core.sharded.memory` itself, run on the meta device. Master
weights and states on the device: the rules of `zero_core.optim.device_tier` over the same layout,
with the states that the optimizer makes for a tiny parameter. Whole parameters in a step:
`zero_core.optim.whole_tier`. Offloaded state, offloaded parameters and quantized collectives: the
closed-form functions of other packages (`zero_core.footprint.footprints`). Activations:
`zero_core.footprint.activations`.

Byte counts are those of rank 0. Other ranks differ only by padding. The bytes of whole parameters
are maxima over all ranks.

[Note: transfers]
The calls of `zero_core.core.passes` are counted for a step in which every unit is used once per
micro-step, in the order of the module tree, with gradients up to the first unit. ZeRO (arXiv
1910.02054), section 7: at stage 3 parameters are gathered once for forward and once for backward.
The last block, the root and the tail are gathered once per micro-step. (The vertical schedule
gathers per step instead.) Gradients are reduced once per micro-step. A quantized collective counts
as one call per phase or hop.

[Note: outside of tensors]
Allocator: torch's ``c10/core/AllocatorConfig.h``. Requests up to 1 MiB share segments of 2 MiB.
Requests below 10 MiB share segments of 20 MiB. A larger request has a separate segment, rounded up
to 2 MiB. Streams share no segments. cuBLAS: torch's ``getChosenWorkspaceSize``, 32 MiB since Hopper
and 8 MiB before: a plan does not know the device, and counts the larger. NCCL, on 8 H100 with
NVSwitch (NVIDIA/nccl, issue 1685): 1.06 GB with CUDA's context and a communicator, and 4.34 GB
after the first all-to-all, which connects each pair of ranks by 32 channels of 12 MiB. Between
nodes NCCL has a shared buffer of 512 MiB (issue 2363). Context: 0.4 to 0.6 GB with lazy loading
(pytorch/pytorch, issue 109888).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch

from zero_core.blueprint import Blueprint
from zero_core.comm.fused_sum import sum_dtype
from zero_core.comm.host import coded_room
from zero_core.comm.meter import FACTS, GRADIENTS, ORDER, PARAMETERS, Links, Traffic
from zero_core.config import Config, ZeroConfig
from zero_core.core.facts import facts_nbytes
from zero_core.extensions.invariance import arithmetic_of
from zero_core.footprint.footprints import (
    CollectivesFootprint,
    Footprints,
    ParamFootprintFactory,
    TierFootprint,
    TierFootprintFactory,
    UploadFootprint,
    learning_rate,
)
from zero_core.layout.arithmetic import Layout, Segment, round_up
from zero_core.layout.gradient_plan import accumulated_dtype, communicated_dtype
from zero_core.optim.device_tier import TURN_NUMEL, optimizer_maker, probe_states, widened_numel
from zero_core.optim.factory import has_kernel_rule
from zero_core.optim.whole_tier import step_bytes
from zero_core.plugins import call_factory
from zero_core.runtime.host_inputs import MAX_IN_PIECE, page_locked_bytes
from zero_core.sharded.memory import Memory
from zero_core.sharded.param_offload import offloaded_segments
from zero_core.step.update import may_speculate

_META = torch.device("meta")
_WHOLES = "whole parameters in a step"
_MIB = 1 << 20
_NUM_THREADS = 2  # threads with a workspace: the forward's and autograd's
_CONTEXT = _COMMUNICATOR = 500 * 10**6
_PEER = 470 * 10**6  # for each peer on the node, in an all-to-all
_NETWORK = 512 * _MIB  # for all peers on other nodes, in an all-to-all


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one rank by kind, on the compute device and in host memory."""

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
    """Bytes per rank of one configuration, for any ratio of its optimizer state on the host."""

    def __init__(
        self,
        drawn: Blueprint,
        config: Config,
        footprints: Footprints,
        links: Links,
        buffer_bytes: int,
    ) -> None:
        self._layout = layout = drawn.layout
        self._config = config
        self._links = links
        self._footprints = footprints
        is_accelerated = links.is_ring  # accelerators use a ring; on a CPU the device is the host
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
            offloaded=self.resting,
        )
        owns_grads = is_offloaded and drawn.updates_slices
        buffers = memory.allocate_gradients(owns_grads=owns_grads, adds_grads=owns_grads)
        # plan of each trainable segment's gradient, by segment index
        self.gradients = {index: held.plan for index, held in buffers.items()}
        self._numel = layout.local_numel(is_sharded=memory.has_sharded_state)
        # ``(start, stop, segment)`` of each segment's part of this rank's local flat space
        self.spans = [(*span, layout.segments[index]) for index, span in memory.spans.items()]
        self._whole_bytes: tuple[int, int] | None = None  # `step_bytes`, for whole parameters
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
        shape = (2,) if drawn.updates_slices else (2, 2)  # factored states need a matrix
        updated = config.master_dtype(torch.bfloat16)
        states = probe_states(make, drawn.groups, torch.device("cpu"), updated, shape)
        self._state_sizes = [dtype.itemsize for dtype in states.values()]  # bytes per element
        self._state_bytes = sum(self._state_sizes)
        self.collectives = footprints.collectives(config, links)
        is_each = any(plan.is_passed_on_each for plan in self.gradients.values())
        self.num_added = config.gradient_accumulation_steps if is_each else 1
        self.tier = self._tier_footprint(drawn, memory) if is_offloaded else None
        # largest host memory of `Engine.async_save`: a copy of a shard's master weights and states
        self.async_save_bytes = sum(
            s.shard_numel * (config.master_dtype(s.dtype).itemsize + self._state_bytes)
            for *_, s in self.spans
        )
        # whether every package that the configuration needs is installed
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
        # bytes of a micro-batch's gradient of each tied weight of the root, which is complete only
        # at the end of a vertical backward. Empty for other schedules
        self.tied = [
            p.numel * p.dtype.itemsize
            for n, p in enumerate(layout.params)
            if config.is_vertical and p.is_trainable and p.aliases and n in root
        ]
        steps = config.gradient_accumulation_steps
        are_tied_moved = config.has_inputs_on_host and is_accelerated
        copies = patches = 0
        if config.memory_checkpoint is not None:  # two slots for own and each peer's copy
            frozen = (s for s in layout.segments if not s.is_trainable)
            kept = self.async_save_bytes + sum(s.shard_numel * s.dtype.itemsize for s in frozen)
            has_nodes = links.num_nodes > 1
            copies = 2 * kept * (1 + config.memory_checkpoint.copies * has_nodes)
        if (wanted := config.weight_patches) is not None:  # upper bound
            compared = [s.shard_numel for *_, s in self.spans if s.dtype.itemsize == 2]
            numel = sum(compared)
            being_made, most = numel // 4, wanted.versions * numel * 5 // 32
            if is_accelerated:  # two sets of bits that are copied from the device
                being_made += sum(page_locked_bytes(-(-n // 8), 2, 1) for n in compared)
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
        # A unit's gradient shards of one micro-step, before they are added to earlier ones.
        further: Counter[int] = Counter()
        for s in layout.segments if layout.world_size > 1 and steps > 1 else ():
            plan = self.gradients.get(s.index)
            if plan is not None and plan.is_shard_kept and not plan.is_sequential:
                further[s.unit] += s.shard_numel * accumulated_dtype(s, config).itemsize
        # Buffers grow to the largest message, so the worst case counts.
        worst = footprints.collectives(config, links, is_worst_case=True)
        gathers, reductions = collectives_memory(worst, layout, config)
        messages: Counter[str] = Counter()
        for kinds in (gathers, reductions):
            messages.update({kind: sum(sizes) for kind, sizes in kinds.items()})
        # Offloaded shards, which a tier on the device rounds before their copy to the host.
        rounded = (
            s.shard_numel * s.dtype.itemsize
            for *_, s in self.spans
            if s in self.resting and s.dtype != config.master_dtype(s.dtype)
        )
        is_rounded = is_accelerated and not is_offloaded
        # Gradients in autograd's memory: a unit's largest, and its small ones waiting to be added.
        held: Counter[int] = Counter()
        largest: Counter[int] = Counter()
        for index, plan in self.gradients.items():
            s = layout.segments[index]
            sizes = [slot.stop - slot.start for slot in s.slots]
            small = [*compress(sizes, plan.small_slots(s, is_cpu=not is_accelerated))]
            waiting = sum(small) - max(sizes) * (max(sizes) in small)
            held[s.unit] += min(waiting, plan.held_numel(s)) * s.dtype.itemsize
            largest[s.unit] = max(largest[s.unit], max(sizes) * s.dtype.itemsize)
        self._blocks = memory.expected_blocks()  # bytes of each allocation of some kinds, by kind
        exchanged, published = self._exchange_buffers(), [max(rounded, default=0) * is_rounded]
        # The same for the streams of gathers, of reductions, and of copies to the host.
        self._apart: list[dict[str, list[int]]] = [
            gathers,
            {"exchange buffers": exchanged, **reductions},
            {"updated shards": published},
        ]
        self._fixed = {
            **{kind: sum(sizes) for kind, sizes in self._blocks.items()},
            "exchange buffers": sum(exchanged),
            "micro-step gradient": max(further.values(), default=0),
            "parameter gradient": max((held + largest).values(), default=0),
            "gradients of tied weights": (2 if are_tied_moved else steps) * sum(self.tied),
            **messages,
            "updated shards": sum(published),
            "model buffers": buffer_bytes,
        }

    def _tier_footprint(self, drawn: Blueprint, memory: Memory) -> TierFootprint | None:
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
        """Return the bytes with share ``ratio`` of the states on the host."""
        host: dict[str, int] = {}
        kept = {"master weights": 0, "optimizer states": 0}  # fixes the order of kinds
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
        masters = 0
        sizes: dict[torch.dtype, list[int]] = {}  # elements of each segment, by master dtype
        has_narrow: set[torch.dtype] = set()  # master dtypes of gradients that are widened
        for low, high, segment in self.spans:
            numel = min(high, stop) - max(low, start)
            if numel <= 0:
                continue
            master = self._config.master_dtype(segment.dtype)
            if segment.dtype != master or segment in self.resting:
                masters += numel * master.itemsize
            sizes.setdefault(master, []).append(numel)
            plan = self.gradients[segment.index]  # the tier's own sums have the master dtype
            if plan.offered != master and not plan.is_passed_on_each:
                has_narrow.add(master)
        states = (stop - start) * self._state_bytes
        kept = {"master weights": masters, "optimizer states": states}
        if self._whole_bytes is not None:
            return {**kept, _WHOLES: sum(self._whole_bytes)}
        widened = (min(widened_numel(sizes[d]), TURN_NUMEL) * d.itemsize for d in has_narrow)
        return {**kept, "widened gradients": sum(widened)}

    def host_link_bytes(self, ratio: float) -> tuple[int, int]:
        """Return the bytes per step from the device to the host, and back.

        Gradients, and new values of offloaded parameters, go to the host. New values, and offloaded
        shards for each gather, go back.
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

    def _exchange_buffers(self) -> list[int]:
        """Return the bytes of each buffer that reductions receive into.

        On accelerators reductions run one by one and share a buffer. On hosts a unit's reductions
        run concurrently, and buffers are kept by size. Encoded gradients are sent unit by unit.
        """
        links, footprint = self._links, self.collectives
        has_shared_memory = links.num_nodes == 1 and not self._links.is_ring
        if links.world_size == 1 or has_shared_memory:
            return []
        num_messages = links.world_size - links.ranks_per_node
        if links.sums_in_two_levels:
            num_messages = links.num_nodes - 1
        slices: Counter[tuple[int, torch.dtype]] = Counter()
        messages: Counter[int] = Counter()  # bytes of encoded gradients, in each direction
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
                        # A device also has a row for its own slice, and no length fields.
                        room = (num_messages + 1) * sizes[1]
                        coded[room if links.is_ring else num_messages * coded_room(sizes[1])] += 1
            slices |= of_unit
            messages |= coded
        if self._links.is_ring:
            largest = max((numel * dtype.itemsize for numel, dtype in slices), default=0)
            return [largest, *2 * [max(messages, default=0)]]
        held = sum(n * numel * dtype.itemsize for (numel, dtype), n in slices.items())
        return [held, 2 * sum(n * nbytes for nbytes, n in messages.items())]

    def outside_of_tensors(self, memory: MemoryUse) -> dict[str, int]:
        """Estimate the device bytes by library, beside those of ``memory``."""
        blocks = {kind: [nbytes] for kind, nbytes in memory.device.items()} | self._blocks
        numel = memory.device.get("optimizer states", 0) // max(self._state_bytes, 1)
        blocks["optimizer states"] = [numel * size for size in self._state_sizes]
        apart = {kind for kinds in self._apart for kind in kinds}
        streams = [[n for kind, sizes in blocks.items() if kind not in apart for n in sizes]]
        streams += [[n for sizes in kinds.values() for n in sizes] for kinds in self._apart]
        # Groups: one of the program, one for gathers, and one for reductions (all-to-alls). Sums in
        # two levels add two groups for reductions, and gathers in two phases add two.
        links, asked = self._links, self._config.zero_optimization.quantized_key
        levels, num_groups = links.sums_in_two_levels, 3 * (links.world_size > 1)
        num_groups += 2 * levels + 2 * (asked is not None and levels)
        peers = (1 + levels) * (links.ranks_per_node - 1)
        far = (1 + levels) * (links.num_nodes > 1)
        return {
            "allocator": sum(_unused_bytes(sizes) for sizes in streams if any(sizes)),
            "cuBLAS": _NUM_THREADS * 32 * _MIB,
            "NCCL": num_groups * _COMMUNICATOR + peers * _PEER + far * _NETWORK,
            "CUDA context": _CONTEXT,
        }


def _unused_bytes(sizes: list[int]) -> int:
    """Return the bytes that blocks of ``sizes`` leave unused in segments of torch's allocator."""
    unused: list[int] = []  # free bytes of each segment for blocks above 1 MiB
    for size in (n for n in sizes if n > _MIB):
        place = min((n for n in unused if n >= size), default=0)
        if place:
            unused.remove(place)
        else:
            place = 20 * _MIB if size < 10 * _MIB else round_up(size, 2 * _MIB)
        unused.append(place - size)
    # Each stream has some small tensors, so at least one segment of 2 MiB.
    small = 1 + sum(n for n in sizes if n <= _MIB)
    return sum(unused) + round_up(small, 2 * _MIB) - small


def num_gathers(segment: Segment, layout: Layout, config: Config) -> int:
    """Return how often the segment's parameters are gathered in one optimizer step."""
    stage = config.zero_optimization.stage
    if stage < 3:  # only slices that other ranks update are gathered
        return int(stage > 0 and segment.is_trainable)
    # The root and the tail stay gathered, and backward begins with the last block.
    is_once = segment.unit == 0 or segment.unit >= layout.last_block
    passes = 1 if config.is_vertical else config.gradient_accumulation_steps
    return passes * (1 if is_once else 2)


def collectives_memory(
    footprint: CollectivesFootprint | None, layout: Layout, config: Config
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Return the bytes of each buffer of `CollectivesFootprint.memory`: of gathers, of reductions.

    Both are empty without ``footprint``.
    """
    if footprint is None:
        return {}, {}
    segments = layout.segments
    shards = [(s.shard_numel, s.dtype, s.is_trainable) for s in segments]
    reduced = [
        (s.shard_numel, communicated_dtype(s, config), accumulated_dtype(s, config))
        for s in segments
        if s.is_trainable
    ]
    return footprint.memory(shards, ()), footprint.memory((), reduced)


def step_traffic(
    layout: Layout,
    config: Config,
    links: Links,
    footprint: CollectivesFootprint | None,
    host_link: tuple[int, int] = (0, 0),
) -> tuple[Traffic, ...]:
    """Return the transfers of one optimizer step.

    Without the ``footprint`` that a configuration needs, gathers and reductions are left out.
    ``host_link`` has the bytes to the host and back, with offload.
    """
    sent: defaultdict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    zero, steps = config.zero_optimization, config.gradient_accumulation_steps
    is_known = footprint is not None or zero.quantized_key is None
    for segment in layout.segments if layout.world_size > 1 and is_known else ():
        anew, each = gather_calls(segment, links, footprint)
        # With a secondary shard, each step gathers a new version once. Frozen weights never change.
        sent["all_gather", PARAMETERS] += anew * int(segment.is_trainable)
        sent["all_gather", PARAMETERS] += each * num_gathers(segment, layout, config)
        if segment.is_trainable:
            calls, is_quantized = reduction_calls(segment, config, links, footprint)
            sent["all_to_all" if is_quantized else "reduce_scatter", GRADIENTS] += calls * steps
            if zero.stage == 0:
                width = accumulated_dtype(segment, config).itemsize
                sent["all_gather", GRADIENTS].append(links.gather(segment.shard_numel * width))
    if layout.world_size > 1:
        nbytes = facts_nbytes(len(layout.params), len(layout.units), arithmetic_of(config))
        sent["all_reduce", FACTS] = [links.all_reduce(nbytes)]
    found = [
        Traffic(*key, len(sent[key]), *map(sum, zip(*sent[key], strict=True)))
        for key in ORDER
        if sent[key]
    ]
    if any(host_link):
        found.append(Traffic("to_host", "gradients", 1, host_link_bytes=host_link[0]))
        found.append(Traffic("to_device", "parameters", 1, host_link_bytes=host_link[1]))
    return tuple(found)


def gather_calls(
    segment: Segment, links: Links, footprint: CollectivesFootprint | None
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return a gather's calls per version and per use, each as bytes within and between nodes."""
    numel, dtype, is_trained = segment.shard_numel, segment.dtype, segment.is_trainable
    gather = None if footprint is None else footprint.gather(numel, dtype, is_trainable=is_trained)
    if footprint is None or gather is None:
        return [], [links.gather(numel * dtype.itemsize)]

    def mean(groups: Iterable[range], nbytes: int) -> tuple[int, int]:
        """Return the mean bytes that a rank sends when equal groups gather ``nbytes`` per rank."""
        counts = Counter(map(links.among, groups))  # count groups with equal links together
        sent = [(number, *of_group.gather(nbytes)) for of_group, number in counts.items()]
        near = sum(number * near for number, near, _ in sent)
        far = sum(number * far for number, _, far in sent)
        return near // counts.total(), far // counts.total()

    # Phase 1 is among ranks of equal index in their groups, phase 2 within each group.
    size, num_ranks = footprint.group_size, links.world_size
    across = (range(place, num_ranks, size) for place in range(size))
    within = (range(start, start + size) for start in range(0, num_ranks, size))
    first = [mean(across, gather.across_nbytes)] if footprint.num_groups > 1 else []
    second = [mean(within, gather.within_nbytes)] if size > 1 else []
    return (first, second) if gather.is_kept else ([], first + second)


def reduction_calls(
    segment: Segment, config: Config, links: Links, footprint: CollectivesFootprint | None
) -> tuple[list[tuple[int, int]], bool]:
    """Return a reduction's calls (bytes within and between nodes), and whether it is quantized."""
    numel, dtype = segment.shard_numel, communicated_dtype(segment, config)
    hops = None if footprint is None else footprint.reduction(numel, dtype)
    if hops is not None:
        near, nodes = links.ranks_per_node - 1, links.num_nodes
        calls = [(near * nodes * hops.within_nbytes, 0)] if near else []
        return calls + ([(0, (nodes - 1) * hops.across_nbytes)] if nodes > 1 else []), True

    def coded(own: torch.dtype) -> int:
        """Return the expected bytes of a slice that is sent to another node."""
        found = None
        if footprint is not None and links.codes_slices:
            found = footprint.coded_nbytes(numel, own)
        return numel * own.itemsize if found is None else found[0]

    wide = sum_dtype(dtype)
    within, _ = links.reduction(numel * dtype.itemsize, numel * wide.itemsize)
    _, between = links.reduction(coded(dtype), coded(wide))
    return [(within, between)], False


@dataclass(frozen=True)
class TrafficChoice:
    """Traffic of one configuration, per rank and optimizer step."""

    name: str  # "as configured", "plain", or the enabled feature
    settings: Mapping[str, Any]  # changed keys of ``zero_optimization``
    traffic: tuple[Traffic, ...]  # expected, without transfers between device and host
    within_node_bytes: int  # bytes that a rank sends within its node
    between_nodes_bytes: int  # bytes that a rank sends to other nodes
    most_between_nodes_bytes: int  # upper bound of ``between_nodes_bytes``
    kept_bytes: int  # extra memory: secondary shards, messages, quantization errors


def traffic_choices(layout: Layout, config: Config, links: Links) -> tuple[TrafficChoice, ...]:
    """Return the traffic as configured, and with each key that would change it.

    Choices that need a missing package are left out. Empty for one rank, if nothing can change, or
    if the configuration itself needs a missing package.
    """
    if links.world_size == 1:
        return ()
    footprints = Footprints()  # separate, so that packages of a choice do not count as missing
    found: list[TrafficChoice] = []
    for name, settings in _choices(config.zero_optimization, links):
        zero = config.zero_optimization.model_copy(update=settings)
        changed = config.model_copy(update={"zero_optimization": zero})
        if settings and changed == config:
            continue
        expected = footprints.collectives(changed, links)
        most = footprints.collectives(changed, links, is_worst_case=True)
        if expected is None and zero.quantized_key is not None:
            if not settings:
                return ()
            continue
        traffic = step_traffic(layout, changed, links, expected)
        at_most = step_traffic(layout, changed, links, most)
        near = sum(t.within_node_bytes for t in traffic)
        far, most_far = (sum(t.between_nodes_bytes for t in sent) for sent in (traffic, at_most))
        buffers = collectives_memory(most, layout, changed)
        kept = sum(sum(sizes) for kinds in buffers for sizes in kinds.values())
        found.append(TrafficChoice(name, settings, traffic, near, far, most_far, kept))
    return tuple(found) if len(found) > 1 else ()


_PLAIN = {
    key: ZeroConfig.model_fields[key].default
    for key in (
        "zero_quantized_weights",
        "zero_quantized_nontrainable_weights",
        "zero_hpz_partition_size",
        "zero_lossless_weights",
        "zero_lossless_gradients",
        "zero_quantized_gradients",
        "zeropp_loco_param",
    )
}
_LOSSLESS = {"zero_lossless_weights": True, "zero_quantized_weights": False}
_UNQUANTIZED = {"zero_quantized_gradients": False, "zeropp_loco_param": None}
_CODED = {"zero_lossless_gradients": True, **_UNQUANTIZED}
_FOUR_BIT = {
    "zero_quantized_weights_format": "int4_difference",
    "zero_quantized_gradients_within_node": "int8",
    "zero_quantized_gradients_between_nodes": "int4",
    "zero_quantized_gradients_hadamard": True,
}
"""SDP4Bit (arXiv 2410.15526): differences of weights, gradients in 8 and 4 bits, rotated."""


def _choices(zero: ZeroConfig, links: Links) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and keys of each choice: single keys toggled, and combinations."""
    yield "as configured", {}
    yield "plain", _PLAIN
    has_nodes = links.num_nodes > 1
    every: dict[str, Any] = {}
    if zero.stage == 3 and has_nodes and links.ranks_per_node > 1:
        every["zero_hpz_partition_size"] = links.ranks_per_node
    if zero.stage == 3:
        every["zero_quantized_weights"] = True
    every["zero_quantized_gradients"] = True
    # Quantization rounds what the lossless key sends exactly, so it excludes that key.
    rounded: dict[str, Any] = {"zero_lossless_weights": False}
    not_coded: dict[str, Any] = {"zero_lossless_gradients": False}
    further = {"zero_quantized_weights": rounded, "zero_quantized_gradients": not_coded}
    for key, value in every.items():
        name = key if value is True else f"{key} {value}"
        yield name, {key: value, **further.get(key, {})}
        if getattr(zero, key) != _PLAIN[key]:
            is_of_gradients = key == "zero_quantized_gradients"
            yield f"without {key}", _UNQUANTIZED if is_of_gradients else {key: _PLAIN[key]}
    if has_nodes:
        yield "zero_lossless_gradients", _CODED
    if zero.stage > 0 and has_nodes:
        quantized = {"zero_quantized_gradients": True, **not_coded}
        yield "zero_lossless_weights", _LOSSLESS
        yield "lossless weights and gradients", {**_LOSSLESS, **_CODED}
        yield "lossless weights, quantized gradients", {**_LOSSLESS, **quantized}
    if zero.zero_lossless_gradients:
        yield "without zero_lossless_gradients", not_coded
    if zero.zero_lossless_weights:
        yield "without zero_lossless_weights", rounded
    if zero.stage == 3:
        every |= {**rounded, **not_coded}
        yield "all of these", every
        if has_nodes:
            yield "4-bit mode", {**every, **_FOUR_BIT}
