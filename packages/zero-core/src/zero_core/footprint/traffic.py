"""Bytes that a rank sends in one optimizer step, by collective and by the links that they cross.

Counted are the calls that `zero_core.core.passes` makes when every unit is used once per
micro-step, in the order of the module tree, with gradients up to the first unit. ZeRO (arXiv
1910.02054), section 7: at stage 3 parameters are gathered once for forward and once for backward,
those of the last block, of the root and of the tail once in all; gradients are reduced once per
micro-step. A quantized gather or reduction counts as a call per phase or hop; see
`zero_core.footprint.footprints`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zero_core.comm.fused_sum import sum_dtype
from zero_core.comm.meter import FACTS, GRADIENTS, ORDER, PARAMETERS, Links, Traffic
from zero_core.config import Config, ZeroConfig
from zero_core.core.facts import facts_nbytes
from zero_core.extensions.invariance import arithmetic_of
from zero_core.footprint.footprints import CollectivesFootprint, Footprints
from zero_core.footprint.forecast import collectives_memory, num_gathers
from zero_core.layout.arithmetic import Layout, Segment
from zero_core.layout.gradient_plan import accumulated_dtype, communicated_dtype


def step_traffic(
    layout: Layout,
    config: Config,
    links: Links,
    footprint: CollectivesFootprint | None,
    host_link: tuple[int, int] = (0, 0),
) -> tuple[Traffic, ...]:
    """Return every transfer of one optimizer step, quantized ones with a ``footprint`` alone.

    ``host_link`` are bytes to the host and back, with offload.
    """
    sent: defaultdict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    zero, steps = config.zero_optimization, config.gradient_accumulation_steps
    is_known = footprint is not None or zero.quantized_key is None
    for segment in layout.segments if layout.world_size > 1 and is_known else ():
        anew, each = gather_calls(segment, links, footprint)
        # With a secondary shard a step's new version is gathered once, frozen weights never.
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
    """Return a gather's calls per version and per use: bytes within and between nodes."""
    numel, dtype, is_trained = segment.shard_numel, segment.dtype, segment.is_trainable
    gather = None if footprint is None else footprint.gather(numel, dtype, is_trainable=is_trained)
    if footprint is None or gather is None:
        return [], [links.gather(numel * dtype.itemsize)]

    def mean(groups: Iterable[range], nbytes: int) -> tuple[int, int]:
        """Return what a rank sends when each group, all equally large, gathers ``nbytes`` each."""
        counts = Counter(map(links.among, groups))  # groups with the same links count together
        sent = [(number, *of_group.gather(nbytes)) for of_group, number in counts.items()]
        near = sum(number * near for number, near, _ in sent)
        far = sum(number * far for number, _, far in sent)
        return near // counts.total(), far // counts.total()

    # Ranks of equal place in their group exchange in phase 1, the ranks of a group in phase 2.
    size, num_ranks = footprint.group_size, links.world_size
    across = (range(place, num_ranks, size) for place in range(size))
    within = (range(start, start + size) for start in range(0, num_ranks, size))
    first = [mean(across, gather.across_nbytes)] if footprint.num_groups > 1 else []
    second = [mean(within, gather.within_nbytes)] if size > 1 else []
    return (first, second) if gather.is_kept else ([], first + second)


def reduction_calls(
    segment: Segment, config: Config, links: Links, footprint: CollectivesFootprint | None
) -> tuple[list[tuple[int, int]], bool]:
    """Return the calls of one reduction of a segment, as `gather_calls`, and if it is quantized."""
    numel, dtype = segment.shard_numel, communicated_dtype(segment, config)
    hops = None if footprint is None else footprint.reduction(numel, dtype)
    if hops is not None:
        near, nodes = links.ranks_per_node - 1, links.num_nodes
        calls = [(near * nodes * hops.within_nbytes, 0)] if near else []
        return calls + ([(0, (nodes - 1) * hops.across_nbytes)] if nodes > 1 else []), True

    def coded(own: torch.dtype) -> int:
        """Return the bytes of a slice that is sent to another node."""
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
    """One configuration of the traffic, per rank and optimizer step."""

    name: str  # "as configured", "plain", or what is turned on
    settings: Mapping[str, Any]  # keys of ``zero_optimization`` that make it
    traffic: tuple[Traffic, ...]  # expected, without copies between a device and its host
    within_node_bytes: int  # bytes that a rank sends within its node
    between_nodes_bytes: int  # bytes that a rank sends to other nodes
    most_between_nodes_bytes: int  # the most that it may send to them
    kept_bytes: int  # memory for it: secondary shards, messages and errors


def traffic_choices(layout: Layout, config: Config, links: Links) -> tuple[TrafficChoice, ...]:
    """Return the configuration as it is, and with each key that would change its traffic.

    Choices that need a package which is not installed are left out; all are if the configuration
    does.
    """
    if links.world_size == 1:
        return ()
    footprints = Footprints()  # what a choice alone would need is not missing
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
        kept = sum(collectives_memory(most, layout, changed).values())
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
    """Yield each flag turned on, or off where it is on, and all of them."""
    yield "as configured", {}
    yield "plain", _PLAIN
    has_nodes = links.num_nodes > 1
    every: dict[str, Any] = {"zero_quantized_gradients": True}
    if zero.stage == 3:
        every = {"zero_quantized_weights": True, **every}
    if zero.stage == 3 and has_nodes and links.ranks_per_node > 1:
        every = {"zero_hpz_partition_size": links.ranks_per_node, **every}
    # Quantized weights or gradients round what the other key sends exactly.
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
