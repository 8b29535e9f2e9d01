"""Plans with qwZ, hpZ and qgZ against the papers' closed forms, every byte accounted for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

import zero_core
from zero_core import Plan
from zero_core.testing import Case, wide_blocks

LOSSLESS = (
    *("zero_lossless_gradients", "zero_lossless_weights", "lossless weights and gradients"),
    "lossless weights, quantized gradients",
)
"""Choices of traffic."""
ALL = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
FOUR_BIT = {
    **ALL,
    "zero_quantized_weights_format": "int4_difference",
    "zero_quantized_gradients_within_node": "int8",
    "zero_quantized_gradients_between_nodes": "int4",
    "zero_quantized_gradients_hadamard": True,
}


def planned(
    model: nn.Module,
    ranks: int,
    per_node: int,
    zero: Mapping[str, Any] | None = None,
    *,
    stage: int = 3,
    device_type: Any = "cpu",
    **further: Any,
) -> Plan:
    config = Case(stage, "bf16", zero=zero or {}).config() | further
    return zero_core.plan(model, config, ranks, ranks_per_node=per_node, device_type=device_type)


def rows(plan: Plan) -> dict[str, tuple[int, int, int]]:
    """Return each collective's calls, bytes within a node and bytes between nodes.

    The reduction of the step's statistics is left out.
    """
    return {
        f"{t.collective} of {t.content}": (t.num_calls, t.within_node_bytes, t.between_nodes_bytes)
        for t in plan.traffic
        if t.collective != "all_reduce"
    }


def between_nodes(plan: Plan) -> int:
    return sum(t.between_nodes_bytes for t in plan.traffic)


def test_traffic_between_nodes_falls_as_the_papers_say() -> None:
    """ZeRO-3 sends 3 M (two gathers, one reduction), ZeRO++ 0.75 M and SDP4Bit's formats 0.5 M."""
    depth, width, ranks, per_node = 64, 1024, 64, 16
    model, num_nodes = wide_blocks(depth, width), ranks // per_node
    share = 2 * 12 * width * width * depth // ranks * (num_nodes - 1)  # M once to each other node
    plain = planned(model, ranks, per_node)
    together = planned(model, ranks, per_node, {**ALL, "zero_hpz_partition_size": per_node})
    four_bit = planned(model, ranks, per_node, {**FOUR_BIT, "zero_hpz_partition_size": per_node})
    # Both gathers go to each node once, but the last block's second one; gradients go to each rank.
    (_, _, gathered), (_, _, reduced) = rows(plain).values()
    assert gathered == 2 * share - share // depth
    assert reduced == per_node * share
    assert 3 * share >= 3.9 * between_nodes(together)
    assert 3 * share >= 5.8 * between_nodes(four_bit)
    assert between_nodes(plain) >= 3.8 * between_nodes(together)
    assert between_nodes(plain) >= 5.8 * between_nodes(four_bit)
    for few in (together, four_bit):
        assert set(rows(few)) == {"all_gather of parameters", "all_to_all of gradients"}
    assert between_nodes(together) > 0.75 * share  # scales and headers count
    assert between_nodes(four_bit) > 0.5 * share


def test_choices_of_traffic_are_what_plans_with_those_keys_say() -> None:
    model = wide_blocks(3, 128)
    found = planned(model, 8, 4)
    names = [choice.name for choice in found.traffic_choices]
    assert names == [
        "as configured",
        "zero_hpz_partition_size 4",
        *ALL,
        *LOSSLESS,
        "all of these",
        "4-bit mode",
    ]
    kinds = (
        *("secondary shards", "quantized weights", "published weights", "message buffers"),
        "error feedback",
    )
    for choice in found.traffic_choices:
        changed = planned(model, 8, 4, choice.settings)
        assert choice.between_nodes_bytes == between_nodes(changed)
        assert choice.traffic == changed.traffic
        assert choice.kept_bytes == sum(changed.memory.device.get(kind, 0) for kind in kinds)
        depends = any(choice.settings.get(f"zero_lossless_{of}") for of in ("weights", "gradients"))
        assert (choice.most_between_nodes_bytes > choice.between_nodes_bytes) == depends
    (table,) = [t for t in found.tables() if t.title.startswith("Traffic choices")]
    assert [row[0] for row in table.rows] == names


def test_choices_of_traffic_fit_the_stage_the_nodes_and_what_is_configured() -> None:
    model = wide_blocks(2, 64)
    assert planned(model, 1, 1).traffic_choices == ()
    on_one_node = planned(model, 4, 4).traffic_choices
    assert [c.name for c in on_one_node] == ["as configured", *ALL, "all of these"]
    assert {c.between_nodes_bytes for c in on_one_node} == {0}
    assert on_one_node[0].within_node_bytes > max(c.within_node_bytes for c in on_one_node[1:])
    at_stage_2 = planned(model, 4, 2, stage=2).traffic_choices
    names = ["as configured", "zero_quantized_gradients", *LOSSLESS]
    assert [c.name for c in at_stage_2] == names
    alone = planned(model, 4, 1).traffic_choices
    assert not any("partition" in choice.name for choice in alone)
    configured = {**FOUR_BIT, "zero_hpz_partition_size": 2}
    given = planned(model, 4, 2, configured).traffic_choices
    keys = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients")
    names = ["as configured", "plain", *(f"without {key}" for key in keys), *LOSSLESS]
    assert [c.name for c in given] == names
    for choice in given:
        assert choice.traffic == planned(model, 4, 2, {**configured, **choice.settings}).traffic
    assert given[1].between_nodes_bytes == between_nodes(planned(model, 4, 2))
