"""Savings between nodes by quantized collectives and secondary shards.

Each choice is the configuration with a few keys changed; nothing else about the run changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zero_core.comm.meter import Links
from zero_core.config import Config
from zero_core.layout.arithmetic import Layout
from zero_core.plan.footprints import Footprints
from zero_core.plan.forecast import collectives_memory
from zero_core.plan.traffic import step_traffic

_WEIGHTS = {"zero_quantized_weights": True, "zero_lossless_weights": False}
_LOSSLESS = {"zero_lossless_weights": True, "zero_quantized_weights": False}
_GRADIENTS = {"zero_quantized_gradients": True}
_PLAIN = {
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_hpz_partition_size": 1,
    "zero_lossless_weights": False,
    "zero_quantized_gradients": False,
    "zeropp_loco_param": None,
}
_FOUR_BIT = {
    "zero_quantized_weights_format": "int4_difference",
    "zero_quantized_gradients_within_node": "int8",
    "zero_quantized_gradients_between_nodes": "int4",
    "zero_quantized_gradients_hadamard": True,
}
"""SDP4Bit (arXiv 2410.15526): differences of weights, gradients in 8 and 4 bits, rotated."""


@dataclass(frozen=True)
class TrafficChoice:
    """One configuration of the traffic, per rank and optimizer step.

    Attributes:
        name: "as configured", "plain", or what is turned on.
        settings: keys of ``zero_optimization`` that make it, on top of the configuration.
        between_nodes_bytes: bytes that a rank sends to other nodes; expected ones, where they depend
            on the weights' values.
        most_between_nodes_bytes: the most that it may send.
        kept_bytes: memory for it: secondary shards, messages and errors.
    """

    name: str
    settings: Mapping[str, Any]
    between_nodes_bytes: int
    most_between_nodes_bytes: int
    kept_bytes: int


def traffic_choices(
    layout: Layout, config: Config, links: Links, footprints: Footprints
) -> tuple[TrafficChoice, ...]:
    """Return the configuration as it is, and with each key that would change its traffic.

    On one node there is nothing to choose, and below stage 3 only gradients have a choice. Choices
    that need a package which is not installed are left out.
    """
    if links.num_nodes == 1:
        return ()
    found = []
    for name, settings in _choices(config.zero_optimization.stage, links.ranks_per_node):
        zero = config.zero_optimization.model_copy(update=settings)
        changed = config.model_copy(update={"zero_optimization": zero})
        if settings and changed == config:
            continue
        between = []
        for is_worst_case in (True, False):
            footprint = footprints.collectives(
                changed, layout.world_size, links.ranks_per_node, is_worst_case=is_worst_case
            )
            sent = step_traffic(layout, changed, links, footprint)
            between.append(sum(t.between_nodes_bytes for t in sent))
        if footprint is None and zero.quantized_key is not None:
            continue
        kept = collectives_memory(footprint, layout, changed)
        most, expected = between
        found.append(TrafficChoice(name, settings, expected, most, sum(kept.values())))
    return tuple(found) if len(found) > 1 else ()


def _choices(stage: int, ranks_per_node: int) -> Iterator[tuple[str, dict[str, Any]]]:
    partition = {"zero_hpz_partition_size": ranks_per_node}
    yield "as configured", {}
    yield "plain", _PLAIN
    if stage == 3:
        if ranks_per_node > 1:
            yield f"zero_hpz_partition_size {ranks_per_node}", partition
        yield "zero_quantized_weights", _WEIGHTS
    if stage > 0:
        yield "zero_lossless_weights", _LOSSLESS
    yield "zero_quantized_gradients", _GRADIENTS
    if stage > 0:
        yield "lossless weights, quantized gradients", {**_LOSSLESS, **_GRADIENTS}
    if stage == 3:
        yield "all of these", {**partition, **_WEIGHTS, **_GRADIENTS}
        yield "4-bit mode", {**partition, **_WEIGHTS, **_GRADIENTS, **_FOUR_BIT}
