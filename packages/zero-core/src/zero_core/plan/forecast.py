"""Memory of a configuration, worked out on the meta device.

[Note: where the numbers come from]
Parameters, gradients and pools: `zero_core.sharded.memory` itself, run on the meta device. Master
weights and states on the device: the rules of `zero_core.optim.device_tier` over the same layout,
with the states that the optimizer makes in a step on two elements; what whole parameters take in a
step: `zero_core.optim.whole_tier`. Offloaded state, offloaded
parameters and quantized collectives: the closed forms of the packages that serve them; see
`zero_core.plan.footprints`. Activations: `zero_core.plan.activations`.

All byte counts are per rank. The rank planned for is rank 0; all ranks are alike but for padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from zero_core.blueprint import Blueprint
from zero_core.comm.fused_sum import sum_dtype
from zero_core.comm.host import coded_room
from zero_core.comm.meter import Links
from zero_core.config import Config
from zero_core.layout.arithmetic import Layout, Segment
from zero_core.layout.discovery import compute_dtype
from zero_core.layout.gradient_plan import accumulated_dtype, communicated_dtype
from zero_core.optim.factory import has_kernel_rule
from zero_core.optim.probe import optimizer_maker, probe_states
from zero_core.optim.turns import TURN_NUMEL, widened_numel
from zero_core.optim.whole_tier import step_bytes
from zero_core.plan.footprints import (
    CollectivesFootprint,
    Footprints,
    TierFootprint,
    WholeFootprint,
)
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
        """Compute the layout and every size on the meta device, besides the model's buffers."""
        self._layout = drawn.layout
        self._config = config
        self._links = links
        # Then the compute device is another one than the host.
        self._is_accelerated = is_accelerated = links.is_ring
        ranks_per_node = links.ranks_per_node
        zero, world_size = config.zero_optimization, drawn.layout.world_size
        self._has_shared_memory = ranks_per_node == world_size and not is_accelerated
        kind = zero.offload_param.device
        is_apart = kind == "nvme" or (kind == "cpu" and is_accelerated)
        self.resting = offloaded_segments(drawn.layout, config, is_apart=is_apart)
        self._is_offloaded = zero.offload_optimizer.device != "none"
        memory = Memory(
            drawn.found,
            drawn.layout,
            config,
            rank=0,
            device=_META,
            is_accelerated=is_accelerated,
            offloaded=OffloadedSegments(self.resting, None) if self.resting else None,
        )
        owns_grads = self._is_offloaded and drawn.updates_slices
        # how the gradient of each trainable segment is held, by its index
        self.gradients = {
            index: buffers.plan
            for index, buffers in memory.allocate_gradients(
                owns_grads=owns_grads, adds_grads=owns_grads
            ).items()
        }
        self._numel = drawn.layout.local_numel(is_sharded=memory.has_sharded_state)
        # ``(start, stop, segment)`` of each segment in what this rank updates
        self.spans = [(*span, drawn.layout.segments[index]) for index, span in memory.spans.items()]
        self._whole_bytes: tuple[int, int] | None = None  # of a step, where it is; its messages
        if not drawn.updates_slices:
            self._whole_bytes = step_bytes(
                self._layout,
                is_sharded=memory.has_sharded_state,
                is_apart=self._is_offloaded and is_accelerated,
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
        self._footprints = footprints
        self.collectives = footprints.collectives(config, world_size, ranks_per_node)
        self.tier = self._tier_footprint(drawn, memory, footprints)
        # the most host memory of `Engine.async_save`: this rank's states once
        self.async_save_bytes = sum(
            s.shard_numel * (config.master_dtype(s.dtype).itemsize + self._state_bytes)
            for *_, s in self.spans
        )
        find_resting = footprints.param_tier(zero) if self.resting else None
        # whether every package that the configuration asks for is installed
        self.is_complete = (
            (self.collectives is not None or zero.quantized_key is None)
            and (self.tier is not None or not self._is_offloaded)
            and (find_resting is not None or not self.resting)
        )
        params = drawn.layout.params
        root = {slot.param for s in drawn.layout.units[0].segments for slot in s.slots}
        # bytes of a micro-batch's gradient of each weight of the root that is tied, whose last part
        # ends a vertical backward. Empty for other schedules
        self.tied = [
            p.numel * p.dtype.itemsize
            for n, p in enumerate(params)
            if config.is_vertical and p.is_trainable and p.aliases and n in root
        ]
        steps = config.gradient_accumulation_steps
        are_tied_moved = config.has_inputs_on_host and is_accelerated
        resting: dict[str, int] = {}
        if find_resting is not None:
            shards = [(s.index, s.shard_numel, s.dtype) for s in self.resting]
            resting = find_resting(shards=shards, config=zero.model_dump(mode="json"))
        self._fixed_on_host = {
            **resting,
            "copies in memory": self._copies_bytes(has_nodes=world_size > ranks_per_node),
            "weight patches": self._patch_bytes(),
            "gradients of tied weights": sum(
                page_locked_bytes(nbytes, number * steps, min(steps, MAX_IN_PIECE))
                for nbytes, number in Counter(self.tied if are_tied_moved else []).items()
            ),
        }
        self._fixed = {
            **memory.report(is_expected=True),
            "exchange buffers": self._exchange_bytes(),
            "micro-step gradient": self._further_shard_bytes(),
            # Autograd's, before it joins its unit's.
            "parameter gradient": max(
                (p.numel * p.dtype.itemsize for p in params if p.is_trainable), default=0
            ),
            "gradients of tied weights": (2 if are_tied_moved else steps) * sum(self.tied),
            # Buffers grow to the longest message there has been.
            **collectives_memory(
                footprints.collectives(config, world_size, ranks_per_node, is_worst_case=True),
                self._layout,
                config,
            ),
            "model buffers": buffer_bytes,
        }

    def _tier_footprint(
        self, drawn: Blueprint, memory: Memory, footprints: Footprints
    ) -> TierFootprint | None:
        zero = self._config.zero_optimization
        if self._is_offloaded and not drawn.updates_slices:
            return self._whole_footprint()
        make = footprints.state_tier(zero) if self._is_offloaded else None
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
            is_accelerated=self._is_accelerated,
            optimizer_class=type(drawn.optimizer),
            groups=drawn.groups,
            config=zero.model_dump(mode="json"),
            has_kernel=has_kernel_rule(self._config, drawn.given),
            is_speculative=may_speculate(self._config),
        )
        return made

    def _whole_footprint(self) -> WholeFootprint:
        """Return the bytes of whole parameters that are updated on the host."""
        kept = self._own_tier_bytes(0, self._numel)
        down = up = 0
        for low, stop, segment in self.spans:
            numel = stop - low
            is_own = segment.dtype == self._config.master_dtype(segment.dtype)
            if self._is_accelerated and is_own and segment not in self.resting:
                kept["master weights"] += numel * segment.dtype.itemsize
            down += numel * self.gradients[segment.index].offered.itemsize
            up += 0 if segment in self.resting else numel * segment.dtype.itemsize
        assert self._whole_bytes is not None
        on_device = {_WHOLES: self._whole_bytes[1] * self._is_accelerated}
        return WholeFootprint({k: n for k, n in kept.items() if n}, on_device, (down, up))

    @property
    def num_added(self) -> int:
        """Gradients of each element that the tier adds up in a step."""
        is_each = any(plan.is_passed_on_each for plan in self.gradients.values())
        return self._config.gradient_accumulation_steps if is_each else 1

    def bytes_in_file(self, ratio: float) -> int:
        """Return the bytes of states on NVMe, read and written in a step. 0 if not known."""
        return 0 if self.tier is None else self.tier.file_bytes(ratio)

    def memory(self, ratio: float) -> MemoryUse:
        """Return the bytes with the first ``ratio`` of states on the host: see `is_complete`."""
        host: dict[str, int] = {}
        kept = {"master weights": 0, "optimizer states": 0}  # in this order
        if self.tier is not None:
            if self._is_accelerated and self._whole_bytes is None:
                kept |= self._own_tier_bytes(*self.tier.device_span(ratio))
            kept |= self.tier.device_bytes(ratio)
            host = self.tier.host_bytes(ratio)
        elif not self._is_offloaded:
            kept |= self._own_tier_bytes(0, self._numel)
        by_place = {**self._fixed, **kept}, {**host, **self._fixed_on_host}
        return MemoryUse(*({k: n for k, n in kinds.items() if n} for kinds in by_place))

    def _copies_bytes(self, *, has_nodes: bool) -> int:
        """Return the bytes of ``memory_checkpoint``: two slots, of this rank and of another one."""
        settings = self._config.memory_checkpoint
        if settings is None:
            return 0
        frozen = (s for s in self._layout.segments if not s.is_trainable)
        kept = self.async_save_bytes + sum(s.shard_numel * s.dtype.itemsize for s in frozen)
        return 2 * kept * (1 + settings.copies * has_nodes)

    def _patch_bytes(self) -> int:
        """Return the most bytes of the changed positions that ``weight_patches`` keeps."""
        settings = self._config.weight_patches
        if settings is None:
            return 0
        numel = sum(s.shard_numel for *_, s in self.spans if s.dtype.itemsize == 2)
        being_made, most = numel // 4, settings.versions * numel * 5 // 32
        return being_made + (most if settings.max_bytes is None else min(most, settings.max_bytes))

    def _own_tier_bytes(self, start: int, stop: int) -> dict[str, int]:
        """Return the bytes of the engine's own tier over ``[start, stop)``."""
        masters = sum(
            max(min(high, stop) - max(low, start), 0) * self._config.master_dtype(s.dtype).itemsize
            for low, high, s in self.spans
            if s.dtype != self._config.master_dtype(s.dtype) or s in self.resting
        )
        states = (stop - start) * self._state_bytes
        kept = {"master weights": masters, "optimizer states": states}
        if self._whole_bytes is not None:
            return {**kept, _WHOLES: sum(self._whole_bytes)}
        # Gradients are widened to the dtype of the master weights.
        sizes: dict[torch.dtype, list[int]] = {}
        has_narrow: set[torch.dtype] = set()
        for low, high, segment in self.spans:
            numel = min(high, stop) - max(low, start)
            if numel <= 0:
                continue
            master = self._config.master_dtype(segment.dtype)
            sizes.setdefault(master, []).append(numel)
            plan = self.gradients[segment.index]  # a sum of micro-steps is in the master's dtype
            if plan.offered != master and not plan.is_passed_on_each:
                has_narrow.add(master)
        widened = (min(widened_numel(sizes[d]), TURN_NUMEL) * d.itemsize for d in has_narrow)
        return {**kept, "widened gradients": sum(widened)}

    def host_link_bytes(self, ratio: float) -> tuple[int, int]:
        """Return the bytes per step from the device to the host and back.

        To the host: gradients, and new values of parameters that rest there. Back: new values, and
        resting shards as often as they are gathered.
        """
        down, up = (0, 0) if self.tier is None else self.tier.link_bytes(ratio)
        offload = self._config.zero_optimization.offload_optimizer
        if self.tier is not None and offload.lossless_upload:
            found = self._footprints.uploaded_bytes(self._config, self.tier.uploaded_numel(ratio))
            up = up if found is None else min(up, found)
        if self.tier is None:
            down += sum(
                (stop - low) * s.dtype.itemsize for low, stop, s in self.spans if s in self.resting
            )
        return down, up + sum(
            s.shard_numel * s.dtype.itemsize * num_gathers(s, self._layout, self._config)
            for s in self.resting
        )

    def _exchange_bytes(self) -> int:
        """Return the bytes of the buffers that reductions receive into.

        On accelerators reductions run one by one and share one buffer. On hosts a unit's run at
        once, and buffers are kept by size. Messages of coded gradients are sent one unit at a time.
        """
        if self._layout.world_size == 1 or self._has_shared_memory:
            return 0
        slices: Counter[tuple[int, torch.dtype]] = Counter()
        messages: Counter[int] = Counter()
        for unit in self._layout.units:
            reduced = [s for s in unit.segments if s.is_trainable and self._is_reduced_here(s)]
            slices |= Counter(
                (s.padded_numel, communicated_dtype(s, self._config)) for s in reduced
            )
            messages |= Counter(map(self._message_bytes, reduced))
        if self._is_accelerated:
            largest = max((numel * dtype.itemsize for numel, dtype in slices), default=0)
            return largest + 2 * max(messages, default=0)
        held = sum(n * numel * dtype.itemsize for (numel, dtype), n in slices.items())
        return held + 2 * sum(n * nbytes for nbytes, n in messages.items())

    def _message_bytes(self, segment: Segment) -> int:
        """Return the room of the messages of a segment's coded gradient, each way."""
        links, dtype = self._links, communicated_dtype(segment, self._config)
        if self.collectives is None or not links.codes_slices:
            return 0
        num_messages = links.world_size - links.ranks_per_node
        if links.sums_in_two_levels:
            dtype, num_messages = sum_dtype(dtype), links.num_nodes - 1
        found = self.collectives.coded_nbytes(segment.shard_numel, dtype)
        return 0 if found is None else num_messages * coded_room(found[1])

    def _is_reduced_here(self, segment: Segment) -> bool:
        dtype = communicated_dtype(segment, self._config)
        footprint = self.collectives
        return footprint is None or footprint.reduction(segment.shard_numel, dtype) is None

    def _further_shard_bytes(self) -> int:
        """Return the bytes that a unit's shards take before they are added to earlier ones."""
        if self._layout.world_size == 1 or self._config.gradient_accumulation_steps == 1:
            return 0
        units: Counter[int] = Counter()
        for s in self._layout.segments:
            plan = self.gradients.get(s.index)
            if plan is not None and plan.is_shard_kept and not plan.is_sequential:
                units[s.unit] += s.shard_numel * accumulated_dtype(s, self._config).itemsize
        return max(units.values(), default=0)


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


def buffer_bytes(model: nn.Module, config: Config) -> int:
    """Return the bytes of the model's buffers once the engine has cast them."""
    buffers = (b for module in model.modules() for b in module.buffers(recurse=False))
    return sum(b.numel() * compute_dtype(b, config.buffer_dtype).itemsize for b in buffers)
