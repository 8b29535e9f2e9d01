"""What a rank sends in one optimizer step, by collective and by the links that it crosses.

Counted are the calls that `zero_core.flow` makes when every unit is used once per micro-step, in
the order of the module tree, with gradients up to the first unit: ZeRO (arXiv 1910.02054), section
7: parameters twice at stage 3 (once for forward, once for backward, but the last unit's once and
the root's once), gradients once per micro-step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zero_core.config import Config
from zero_core.forecast import num_gathers, quantized_bytes
from zero_core.layout import Layout, Segment
from zero_core.memory import accumulated_dtype, communicated_dtype

__all__ = ["Links", "Traffic", "step_traffic"]


@dataclass(frozen=True)
class Traffic:
    """One kind of transfer in one optimizer step, all micro-steps included.

    Attributes:
        collective: "all_gather", "reduce_scatter", "all_reduce", "to_host" or "to_device".
        content: what is carried.
        num_calls: calls per step.
        within_node_bytes: bytes that a rank sends to ranks of its own node (mean over ranks).
        between_nodes_bytes: bytes that it sends to other nodes.
        host_link_bytes: bytes between its device and its host.
    """

    collective: str
    content: str
    num_calls: int
    within_node_bytes: int = 0
    between_nodes_bytes: int = 0
    host_link_bytes: int = 0

    @property
    def sent_bytes(self) -> int:
        """Bytes over every link."""
        return self.within_node_bytes + self.between_nodes_bytes + self.host_link_bytes


@dataclass(frozen=True)
class Links:
    """Which ranks share a node, and how a gather travels.

    Attributes:
        world_size: number of ranks.
        ranks_per_node: ranks of a node, which have consecutive numbers.
        is_ring: gathers go round a ring, as NCCL's do; otherwise each rank sends its shard to every
            other one, as the engine does on gloo, but to each other node once, where it is handed
            on. Reductions are always direct.
    """

    world_size: int
    ranks_per_node: int
    is_ring: bool

    @property
    def is_once_per_node(self) -> bool:
        """Whether gathers send a shard once to each other node: see `zero_core.direct`."""
        return not self.is_ring and 1 < self.ranks_per_node < self.world_size

    def direct(self, shard_bytes: int) -> tuple[int, int]:
        """Bytes sent (within the node, between nodes) when every other rank is sent a shard."""
        near = self.ranks_per_node - 1
        return near * shard_bytes, (self.world_size - 1 - near) * shard_bytes

    def ring(self, shard_bytes: int) -> tuple[int, int]:
        """The same where shards go round: one rank of a node sends to the next node."""
        total = (self.world_size - 1) * shard_bytes
        between = total // self.ranks_per_node if self.ranks_per_node < self.world_size else 0
        return total - between, between

    def once_per_node(self, shard_bytes: int) -> tuple[int, int]:
        """The same where a shard is sent to each other node once, and handed on there."""
        nodes = self.world_size // self.ranks_per_node
        return (self.ranks_per_node - 1) * nodes * shard_bytes, (nodes - 1) * shard_bytes

    def gather(self, shard_bytes: int) -> tuple[int, int]:
        """An all-gather's bytes, as it travels on this device."""
        if self.is_ring:
            return self.ring(shard_bytes)
        by = self.once_per_node if self.is_once_per_node else self.direct
        return by(shard_bytes)


def step_traffic(
    layout: Layout, config: Config, stage: int, links: Links, host_link: tuple[int, int] = (0, 0)
) -> tuple[Traffic, ...]:
    """Every transfer of one optimizer step.

    Args:
        layout: the model's arithmetic.
        config: the resolved configuration.
        stage: the stage in effect.
        links: where the ranks are.
        host_link: bytes to the host and back, with offload.
    """
    found = list(_collectives(layout, config, stage, links)) if layout.world_size > 1 else []
    down, up = host_link
    if down or up:
        found.append(Traffic("to_host", "gradients", 1, host_link_bytes=down))
        found.append(Traffic("to_device", "parameters", 1, host_link_bytes=up))
    return tuple(found)


def _collectives(layout: Layout, config: Config, stage: int, links: Links) -> Iterator[Traffic]:
    steps = config.gradient_accumulation_steps
    trainable = [s for s in layout.segments if s.is_trainable]
    gathers = []
    for segment in layout.segments:
        calls = num_gathers(segment, len(layout.units), stage, steps)
        quantized = quantized_bytes(segment, config) if stage == 3 else None
        plain = _shard_bytes(segment, segment.dtype)
        gathers += [links.gather(plain if quantized is None else quantized)] * calls
    if gathers:
        yield _sum("all_gather", "parameters", gathers)
    reduced = [links.direct(_shard_bytes(s, communicated_dtype(s, config))) for s in trainable]
    yield _sum("reduce_scatter", "gradients", reduced * steps)
    if stage == 0:
        whole = [links.gather(_shard_bytes(s, accumulated_dtype(s, config))) for s in trainable]
        yield _sum("all_gather", "gradients", whole)
    # Both halves of an all-reduce: 2 / world_size of the whole to everyone. See Engine._decide.
    facts = 8 * (2 + len(layout.params))
    yield _sum("all_reduce", "facts of the step", [links.ring(2 * facts // layout.world_size)])


def _shard_bytes(segment: Segment, dtype: torch.dtype) -> int:
    return segment.shard_numel * dtype.itemsize


def _sum(collective: str, content: str, calls: list[tuple[int, int]]) -> Traffic:
    return Traffic(
        collective,
        content,
        len(calls),
        within_node_bytes=sum(near for near, _ in calls),
        between_nodes_bytes=sum(far for _, far in calls),
    )
