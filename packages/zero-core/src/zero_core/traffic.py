"""What a rank sends in one optimizer step, by collective and by the links that it crosses.

Counted are the calls that `zero_core.flow` makes when every unit is used once per micro-step, in
the order of the module tree, with gradients up to the first unit: ZeRO (arXiv 1910.02054), section
7: parameters twice at stage 3 (once for forward, once for backward, but the last unit's once and
the root's once), gradients once per micro-step. With few bits the phases and hops of
`zero_core.few_bits` take their place; a phase or hop is a call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from zero_core.config import Config
from zero_core.few_bits import FewBits
from zero_core.forecast import num_gathers
from zero_core.layout import Layout, Segment
from zero_core.memory import accumulated_dtype, communicated_dtype

__all__ = ["Links", "Traffic", "step_traffic"]


@dataclass(frozen=True)
class Traffic:
    """One kind of transfer in one optimizer step, all micro-steps included.

    Attributes:
        collective: "all_gather", "reduce_scatter", "all_to_all", "all_reduce", "to_host" or
            "to_device".
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
        is_ring: gathers go round a ring, as NCCL's do; otherwise a shard is sent to each other node
            once and handed on there, as the engine does on gloo.
    """

    world_size: int
    ranks_per_node: int
    is_ring: bool

    @property
    def num_nodes(self) -> int:
        """Nodes."""
        return self.world_size // self.ranks_per_node

    def direct(self, slice_bytes: int) -> tuple[int, int]:
        """Bytes sent (within the node, between nodes) when every other rank gets its own slice.

        Reductions and all-to-alls always travel so.
        """
        near = self.ranks_per_node - 1
        return near * slice_bytes, (self.world_size - 1 - near) * slice_bytes

    def once_per_node(self, shard_bytes: int) -> tuple[int, int]:
        """The same when a shard goes to one rank of each other node, of equal place in its node.

        That rank hands on what arrived to the others there, besides its own shard.
        """
        near = self.ranks_per_node - 1
        return near * self.num_nodes * shard_bytes, (self.num_nodes - 1) * shard_bytes

    def ring(self, shard_bytes: int) -> tuple[int, int]:
        """The same where shards go round: one rank of a node sends to the next node."""
        total = (self.world_size - 1) * shard_bytes
        between = total // self.ranks_per_node if self.ranks_per_node < self.world_size else 0
        return total - between, between

    def gather(self, shard_bytes: int) -> tuple[int, int]:
        """An all-gather's bytes, as it travels on this device."""
        return self.ring(shard_bytes) if self.is_ring else self.once_per_node(shard_bytes)

    def among(self, ranks: Sequence[int]) -> Links:
        """Those of some of the ranks, in that order; spread unevenly, each counts as a node."""
        nodes = [rank // self.ranks_per_node for rank in ranks]
        size = nodes.count(nodes[0])
        runs = [nodes[i : i + size] for i in range(0, len(nodes), size)]
        is_even = all(len(run) == size and len(set(run)) == 1 for run in runs)
        is_apart = len({run[0] for run in runs}) == len(runs)
        return Links(len(ranks), size if is_even and is_apart else 1, self.is_ring)


class _Grid:
    """Gathers in two phases; see `zero_core.few_bits`. Bytes are the mean over all ranks."""

    def __init__(self, links: Links, group_size: int) -> None:
        size, world_size = group_size, links.world_size
        places = [range(place, world_size, size) for place in range(size)]
        groups = [range(start, start + size) for start in range(0, world_size, size)]
        self._across = Counter(links.among(ranks) for ranks in places)
        self._within = Counter(links.among(ranks) for ranks in groups)

    def across(self, nbytes: int) -> tuple[int, int]:
        """Phase 1's bytes of a rank that hands in ``nbytes``."""
        return _mean(self._across, nbytes)

    def within(self, nbytes: int) -> tuple[int, int]:
        """Phase 2's."""
        return _mean(self._within, nbytes)


def _mean(groups: Mapping[Links, int], nbytes: int) -> tuple[int, int]:
    num_ranks = sum(links.world_size * count for links, count in groups.items())
    weights = [links.world_size * count for links, count in groups.items()]
    sent = [links.gather(nbytes) for links in groups]
    near = sum(weight * x for weight, (x, _) in zip(weights, sent, strict=True))
    far = sum(weight * y for weight, (_, y) in zip(weights, sent, strict=True))
    return near // num_ranks, far // num_ranks


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
    few_bits = FewBits(layout, config, stage, links.ranks_per_node)
    yield from _sum("all_gather", "parameters", _gathers(layout, config, stage, links, few_bits))
    steps = config.gradient_accumulation_steps
    trainable = [s for s in layout.segments if s.is_trainable]
    plain = [s for s in trainable if few_bits.hops(s) is None]
    reduced = [links.direct(_shard_bytes(s, communicated_dtype(s, config))) for s in plain]
    yield from _sum("reduce_scatter", "gradients", reduced * steps)
    yield from _sum("all_to_all", "gradients", list(_hops(trainable, links, few_bits)) * steps)
    if stage == 0:
        whole = [links.gather(_shard_bytes(s, accumulated_dtype(s, config))) for s in trainable]
        yield from _sum("all_gather", "gradients", whole)
    # Both halves of an all-reduce: 2 / world_size of the whole to everyone. See Engine._decide.
    facts = 8 * (2 + len(layout.params))
    yield from _sum("all_reduce", "facts of the step", [links.ring(2 * facts // layout.world_size)])


def _gathers(
    layout: Layout, config: Config, stage: int, links: Links, few_bits: FewBits
) -> list[tuple[int, int]]:
    """Each call that gathers parameters, all micro-steps included."""
    steps = config.gradient_accumulation_steps
    grid = _Grid(links, few_bits.group_size)
    found = []
    for segment in layout.segments:
        uses = num_gathers(segment, len(layout.units), stage, steps)
        phases = few_bits.phases(segment)
        if phases is None:
            found += [links.gather(_shard_bytes(segment, segment.dtype))] * uses
            continue
        if few_bits.num_groups > 1:
            # A version is gathered anew by each use, but where a secondary shard keeps it; that of
            # frozen weights stays.
            kept = 1 if segment.is_trainable else 0
            found += [grid.across(phases.across_nbytes)] * (kept if phases.is_kept else uses)
        if few_bits.group_size > 1:
            found += [grid.within(phases.within_nbytes)] * uses
    return found


def _hops(
    trainable: Sequence[Segment], links: Links, few_bits: FewBits
) -> Iterator[tuple[int, int]]:
    """Each call of one micro-step's reductions in two hops."""
    near, nodes = links.ranks_per_node - 1, links.num_nodes
    for hops in filter(None, map(few_bits.hops, trainable)):
        if near:
            yield near * nodes * hops.within_nbytes, 0
        if nodes > 1:
            yield 0, (nodes - 1) * hops.across_nbytes


def _shard_bytes(segment: Segment, dtype: torch.dtype) -> int:
    return segment.shard_numel * dtype.itemsize


def _sum(collective: str, content: str, calls: Sequence[tuple[int, int]]) -> Iterator[Traffic]:
    """The row of these calls, if there are any."""
    if calls:
        near, far = (sum(sent) for sent in zip(*calls, strict=True))
        yield Traffic(collective, content, len(calls), near, far)
