"""What qwZ, hpZ and qgZ send and keep: closed forms of zero-comm's collectives, for plans.

ZeRO++ (arXiv 2306.10209), sections 3.1 to 3.3; weight differences: SDP4Bit (arXiv 2410.15526).

[Note: phases and hops]
W ranks, R of a node, N = W / R nodes; a segment has a shard of s elements for each rank.

Weights are gathered in two **phases** by groups of G consecutive ranks, hpZ's or else a node's:
phase 1 **across** the W / G groups, among ranks of equal place; phase 2 **within** the group. With
secondary shards phase 1 runs once for each version of the weights and what it brought, W / G * s
elements, is kept; phase 2 then carries exact elements. Without them messages travel in both. Where
all ranks are one group there is no phase 1, nothing is kept, and no change is told.

Gradients are reduced in two **hops**: within the node N messages go to each near rank; across, one
message goes to the rank of equal place in each other node.

A shard that no message would shorten travels as it is, as do integers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from zero_core.config import Config
from zero_core.layout import Layout, Segment
from zero_core.memory import accumulated_dtype, communicated_dtype
from zero_core.quantized_form import DIFFERENCE, message_nbytes, quantized_nbytes

__all__ = ["FewBits", "Hops", "Phases"]

_FP32_NBYTES = 4


@dataclass(frozen=True)
class Phases:
    """How a segment's weights are gathered; see [Note: phases and hops].

    Attributes:
        across_nbytes: what a rank hands into phase 1.
        within_nbytes: what it hands into phase 2.
        format: what phase 1's messages hold; None: it carries exact elements.
        is_kept: whether phase 2 starts from a secondary shard.
    """

    across_nbytes: int
    within_nbytes: int
    format: str | None
    is_kept: bool


@dataclass(frozen=True)
class Hops:
    """How a segment's gradients are reduced: bytes of a message in each hop."""

    within_nbytes: int
    across_nbytes: int


class FewBits:
    """One configuration's phases and hops, and what they keep.

    Attributes:
        ranks_per_node: R.
        num_nodes: N.
        group_size: G.
        num_groups: W / G.
    """

    def __init__(self, layout: Layout, config: Config, stage: int, ranks_per_node: int) -> None:
        """``stage`` is the one in effect; ``ranks_per_node`` divides the number of ranks."""
        zero = config.zero_optimization
        self._layout = layout
        self._config = config
        self._zero = zero
        self._has_phases = stage == 3 and layout.world_size > 1
        self._has_hops = zero.zero_quantized_gradients and layout.world_size > 1
        self._has_partition = zero.zero_hpz_partition_size > 1
        self.ranks_per_node = ranks_per_node
        self.num_nodes = layout.world_size // ranks_per_node
        self.group_size = zero.zero_hpz_partition_size if self._has_partition else ranks_per_node
        self.num_groups = layout.world_size // self.group_size if self._has_phases else 1

    def phases(self, segment: Segment) -> Phases | None:
        """How its weights are gathered; None: by the engine's own collective, as they are."""
        if not self._has_phases:
            return None
        kind, message = self._weight_message(segment)
        is_kept = self.num_groups > 1 and (self._has_partition or kind == DIFFERENCE)
        if kind == DIFFERENCE and not is_kept:
            message = None  # there is no other group to tell what changed
        if message is None and not is_kept:
            return None
        exact = segment.shard_numel * segment.dtype.itemsize
        across = exact if message is None else message
        within = self.num_groups * (exact if is_kept else across)
        return Phases(across, within, None if message is None else kind, is_kept)

    def hops(self, segment: Segment) -> Hops | None:
        """How its gradients are reduced; None: by the engine's own collective."""
        if not self._has_hops or not segment.is_trainable:
            return None
        zero, numel = self._zero, segment.shard_numel
        hops = Hops(
            message_nbytes(numel, zero.zero_quantized_gradients_within_node),
            message_nbytes(numel, zero.zero_quantized_gradients_between_nodes),
        )
        dtype = communicated_dtype(segment, self._config)
        taken = [hops.within_nbytes] * (self.ranks_per_node > 1)
        taken += [hops.across_nbytes] * (self.num_nodes > 1)
        is_shorter = max(taken, default=0) < numel * dtype.itemsize
        return hops if dtype.is_floating_point and is_shorter else None

    def _weight_message(self, segment: Segment) -> tuple[str | None, int | None]:
        """The format that its weights travel in, and the length; None: as they are."""
        zero, numel = self._zero, segment.shard_numel
        is_asked = zero.zero_quantized_weights or (
            zero.zero_quantized_nontrainable_weights and not segment.is_trainable
        )
        if not is_asked or not segment.dtype.is_floating_point:
            return None, None
        kind: str = zero.zero_quantized_weights_format
        if kind == DIFFERENCE and not segment.is_trainable:
            kind = "int8"  # what never changes has no differences
        nbytes = message_nbytes(numel, kind)
        return (kind, nbytes) if nbytes < numel * segment.dtype.itemsize else (None, None)

    def memory(self) -> dict[str, int]:
        """Bytes per rank by kind, as the engine's report names them."""
        kept: Counter[str] = Counter()
        buffers: Counter[object] = Counter()  # by purpose, each as long as the longest use
        for segment in self._layout.segments:
            phases, hops = self.phases(segment), self.hops(segment)
            if phases is not None:
                kept += self._kept_weights(segment, phases)
                buffers |= self._gather_buffers(segment, phases)
            if hops is not None:
                kept += self._kept_errors(segment)
                buffers |= self._reduce_buffers(segment, hops)
        return {**kept, "message buffers": sum(buffers.values())}

    def _kept_weights(self, segment: Segment, phases: Phases) -> Counter[str]:
        if phases.is_kept:
            return Counter({"secondary shards": phases.within_nbytes})
        return Counter({"quantized weights": phases.across_nbytes})

    def _gather_buffers(self, segment: Segment, phases: Phases) -> Counter[object]:
        """What a gather needs while it runs; gathers run one after another."""
        size, groups = self.group_size, self.num_groups
        found: Counter[object] = Counter()
        if phases.format is not None and groups > 1:
            found["messages"] = groups * phases.across_nbytes
        if not phases.is_kept:
            found["all messages"] = size * groups * phases.across_nbytes
            return found
        if phases.format is not None:
            found["message"] = phases.across_nbytes
        if phases.format == DIFFERENCE:
            found["change"] = segment.shard_numel * _FP32_NBYTES
        if size > 1:  # groups' slices lie one among another
            found["values", segment.dtype] = size * phases.within_nbytes
        return found

    def _kept_errors(self, segment: Segment) -> Counter[str]:
        """Error feedback keeps what each hop lost, in 8 bits."""
        nodes, near = self.num_nodes, self.ranks_per_node
        if self._zero.zeropp_loco_param is None:
            return Counter()
        within = nodes * quantized_nbytes(near * segment.shard_numel, "int8") if near > 1 else 0
        across = quantized_nbytes(nodes * segment.shard_numel, "int8") if nodes > 1 else 0
        return Counter({"error feedback": within + across})

    def _reduce_buffers(self, segment: Segment, hops: Hops) -> Counter[object]:
        """What a reduction needs while it runs; reductions run one after another."""
        nodes, near, numel = self.num_nodes, self.ranks_per_node, segment.shard_numel
        found: Counter[object] = Counter()
        if near > 1:
            found["sent within"] = found["received within"] = near * nodes * hops.within_nbytes
            found["node's sums"] = nodes * numel * _FP32_NBYTES if nodes > 1 else 0
        if nodes > 1:
            found["sent across"] = found["received across"] = nodes * hops.across_nbytes
        if accumulated_dtype(segment, self._config) != torch.float32:
            found["sum"] = numel * _FP32_NBYTES
        if self._zero.zeropp_loco_param is not None:
            longest = max(near if near > 1 else 0, nodes if nodes > 1 else 0)
            found["compensated"] = found["arrived"] = longest * numel * _FP32_NBYTES
        return found
