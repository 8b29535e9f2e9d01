"""Bytes that a rank sends in one optimizer step, by collective and by the links that they cross.

Counted are the calls that `zero_core.core.passes` makes when every unit is used once per
micro-step, in the order of the module tree, with gradients up to the first unit. ZeRO (arXiv
1910.02054), section 7: at stage 3 parameters are gathered once for forward and once for backward,
those of the last block, of the root and of the tail once in all; gradients are reduced once per
micro-step. A quantized gather or reduction counts as a call per phase or hop; see
`zero_core.plan.footprints`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from zero_core.comm.fused_sum import sum_dtype
from zero_core.comm.meter import Links, Traffic
from zero_core.config import Config
from zero_core.core.facts import facts_nbytes
from zero_core.extensions.invariance import arithmetic_of
from zero_core.layout.arithmetic import Layout, Segment
from zero_core.layout.gradient_plan import accumulated_dtype, communicated_dtype
from zero_core.plan.footprints import CollectivesFootprint
from zero_core.plan.forecast import num_gathers


def step_traffic(
    layout: Layout,
    config: Config,
    links: Links,
    footprint: CollectivesFootprint | None,
    host_link: tuple[int, int] = (0, 0),
) -> tuple[Traffic, ...]:
    """Return every transfer of one optimizer step.

    Without the ``footprint`` of quantized collectives what they carry is left out. ``host_link``
    are bytes to the host and back, with offload.
    """
    found: list[Traffic] = []
    if layout.world_size > 1:
        if footprint is not None or config.zero_optimization.quantized_key is None:
            found += _collectives(layout, config, links, footprint)
        nbytes = facts_nbytes(len(layout.params), len(layout.units), arithmetic_of(config))
        found += _sum("all_reduce", "facts of the step", [links.all_reduce(nbytes)])
    down, up = host_link
    if down or up:
        found.append(Traffic("to_host", "gradients", 1, host_link_bytes=down))
        found.append(Traffic("to_device", "parameters", 1, host_link_bytes=up))
    return tuple(found)


def _collectives(
    layout: Layout, config: Config, links: Links, footprint: CollectivesFootprint | None
) -> Iterator[Traffic]:
    gathers: list[tuple[int, int]] = []
    for segment in layout.segments:
        uses = num_gathers(segment, layout, config)
        anew, each = gather_calls(segment, links, footprint)
        # With a secondary shard a step's new version is gathered once, and frozen weights never.
        gathers += anew * int(segment.is_trainable) + each * uses
    yield from _sum("all_gather", "parameters", gathers)
    steps = config.gradient_accumulation_steps
    trainable = [s for s in layout.segments if s.is_trainable]
    by_way: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    for segment in trainable:
        calls, is_quantized = reduction_calls(segment, config, links, footprint)
        by_way[is_quantized] += calls
    yield from _sum("reduce_scatter", "gradients", by_way[False] * steps)
    yield from _sum("all_to_all", "gradients", by_way[True] * steps)
    if config.zero_optimization.stage == 0:
        whole = [links.gather(_shard_bytes(s, accumulated_dtype(s, config))) for s in trainable]
        yield from _sum("all_gather", "gradients", whole)


def gather_calls(
    segment: Segment, links: Links, footprint: CollectivesFootprint | None
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return a gather's calls per version and per use: bytes within and between nodes."""
    numel, is_trainable = segment.shard_numel, segment.is_trainable
    gather = None
    if footprint is not None:
        gather = footprint.gather(numel, segment.dtype, is_trainable=is_trainable)
    if footprint is None or gather is None:
        return [], [links.gather(_shard_bytes(segment, segment.dtype))]
    # Ranks of equal place in their group exchange in phase 1, the ranks of a group in phase 2.
    # Each phase has links with the number of groups that they join.
    size, num_ranks = footprint.group_size, links.world_size
    across = Counter(links.among(range(place, num_ranks, size)) for place in range(size))
    starts = range(0, num_ranks, size)
    within = Counter(links.among(range(start, start + size)) for start in starts)
    first = [_mean(across, gather.across_nbytes)] if footprint.num_groups > 1 else []
    second = [_mean(within, gather.within_nbytes)] if footprint.group_size > 1 else []
    return (first, second) if gather.is_kept else ([], first + second)


def reduction_calls(
    segment: Segment, config: Config, links: Links, footprint: CollectivesFootprint | None
) -> tuple[list[tuple[int, int]], bool]:
    """Return the calls of one reduction of a segment, as `gather_calls`, and if it is quantized."""
    dtype = communicated_dtype(segment, config)
    hops = None if footprint is None else footprint.reduction(segment.shard_numel, dtype)
    if hops is None:
        return [_reduction_bytes(segment, dtype, links, footprint)], False
    near, nodes = links.ranks_per_node - 1, links.num_nodes
    calls = [(near * nodes * hops.within_nbytes, 0)] if near else []
    return calls + ([(0, (nodes - 1) * hops.across_nbytes)] if nodes > 1 else []), True


def _reduction_bytes(
    segment: Segment, dtype: torch.dtype, links: Links, footprint: CollectivesFootprint | None
) -> tuple[int, int]:
    """Return the bytes of the engine's own reduction within the node and between nodes."""

    def coded(own: torch.dtype) -> int:
        found = None
        if footprint is not None and links.codes_slices:
            found = footprint.coded_nbytes(segment.shard_numel, own)
        return _shard_bytes(segment, own) if found is None else found[0]

    wide = sum_dtype(dtype)
    near, _ = links.reduction(_shard_bytes(segment, dtype), _shard_bytes(segment, wide))
    _, far = links.reduction(coded(dtype), coded(wide))
    return near, far


def _mean(groups: Counter[Links], nbytes: int) -> tuple[int, int]:
    """Return what a rank sends when each group, all equally large, gathers ``nbytes`` a rank."""
    sent = [(count, *links.gather(nbytes)) for links, count in groups.items()]
    near = sum(count * near for count, near, _ in sent)
    far = sum(count * far for count, _, far in sent)
    return near // groups.total(), far // groups.total()


def _shard_bytes(segment: Segment, dtype: torch.dtype) -> int:
    return segment.shard_numel * dtype.itemsize


def _sum(collective: str, content: str, calls: Sequence[tuple[int, int]]) -> Iterator[Traffic]:
    if calls:
        near, far = (sum(sent) for sent in zip(*calls, strict=True))
        yield Traffic(collective, content, len(calls), near, far)
