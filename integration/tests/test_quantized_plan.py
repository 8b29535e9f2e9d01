"""Plans with qwZ, hpZ and qgZ against the papers' closed forms, every byte accounted for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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


@pytest.mark.parametrize(("ranks", "per_node"), [(64, 16), (4, 2)])
def test_traffic_between_nodes_falls_as_the_papers_say(ranks: int, per_node: int) -> None:
    """ZeRO-3 sends 3 M (two gathers, one reduction), ZeRO++ 0.75 M and SDP4Bit's formats 0.5 M."""
    depth, width = 64, 1024
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


def topologies() -> st.SearchStrategy[tuple[int, int, int]]:
    """Draw ranks, ranks per node and ranks of a partition, where the last two divide the first."""

    def with_divisors(ranks: int) -> st.SearchStrategy[tuple[int, int, int]]:
        divisors = st.sampled_from([d for d in range(1, ranks + 1) if ranks % d == 0])
        return st.tuples(st.just(ranks), divisors, divisors)

    return st.sampled_from([2, 3, 4, 6, 8, 12, 24]).flatmap(with_divisors)


ONE_BLOCK = wide_blocks(1, 64)


@pytest.mark.slow
@given(topologies(), st.sampled_from(["cpu", "accelerator"]))
@settings(max_examples=40, deadline=None)
def test_two_phases_bring_every_shard_to_every_rank_once(topology, device_type):
    ranks, per_node, partition = topology
    zero = {"zero_hpz_partition_size": partition}
    once = planned(ONE_BLOCK, ranks, per_node, zero, device_type=device_type)
    shard = 2 * 12 * 64 * 64 // ranks
    _, within, between = rows(once)["all_gather of parameters"]
    # Means over ranks are whole numbers but for the uneven groups' within and between.
    assert (ranks - 1) * shard - 1 <= within + between <= (ranks - 1) * shard
    nests = partition % per_node == 0 or per_node % partition == 0
    if nests and device_type == "cpu":
        assert between == (ranks // per_node - 1) * shard  # each node gets each shard once


@pytest.mark.parametrize("partition", [1, 2, 4, 8])
def test_a_version_crosses_the_groups_once(partition: int) -> None:
    """Three micro-steps gather the block three times, with secondary shards two of them nearby."""
    ranks, per_node, shard = 8, 4, 2 * 12 * 64 * 64 // 8
    zero = {"zero_hpz_partition_size": partition}
    found = planned(ONE_BLOCK, ranks, per_node, zero, gradient_accumulation_steps=3)
    calls, within, between = rows(found)["all_gather of parameters"]
    held = (8 // partition) * shard
    expected = {
        1: (3, 3 * 3 * 2 * shard, 3 * shard),  # no hpZ: the node's three others, two nodes' shards
        2: (4, (1 * 2 + 3 * 1 * 4) * shard, shard),
        4: (4, 3 * 3 * 2 * shard, shard),
        8: (3, 3 * 3 * 2 * shard, 3 * shard),
    }
    assert (calls, within, between) == expected[partition]
    kept = found.memory.device.get("secondary shards", 0)
    assert kept == (held if partition in (2, 4) else 0)  # all ranks hold what they gather anyway


@pytest.mark.sampled(3)
@pytest.mark.parametrize("partition", [1, 2])
@pytest.mark.parametrize(
    ("kind", "block_nbytes", "block_size"),
    [("int8", 258, 256), ("int4", 66, 128), ("e4m3", 130, 128), ("int4_difference", 130, 256)],
)
def test_messages_of_weights_travel_in_the_first_phase(partition, kind, block_nbytes, block_size):
    """The last of the model's two blocks is gathered once and the other one twice."""
    ranks, per_node = 6, 2
    numel = 12 * 64 * 64 // ranks
    zero = {
        "zero_quantized_weights": True,
        "zero_quantized_weights_format": kind,
        "zero_hpz_partition_size": partition,
    }
    found = planned(wide_blocks(2, 64), ranks, per_node, zero)
    assert numel % block_size == 0
    message = 32 + numel // block_size * block_nbytes
    calls, within, between = rows(found)["all_gather of parameters"]
    device = found.memory.device
    if partition == 2 or kind == "int4_difference":
        assert calls == 2 * 1 + 3 * 1
        assert within == 3 * 3 * 2 * numel  # values of three nodes' ranks, to the other rank
        assert between == 2 * 2 * message
        assert device["secondary shards"] == 2 * 3 * 2 * numel
        assert "quantized weights" not in device
    else:
        assert calls == 3 * 2
        assert within == 3 * 3 * message
        assert between == 3 * 2 * message
        assert device["quantized weights"] == 2 * message
        assert "secondary shards" not in device
    assert device["message buffers"] > 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("ranks", "per_node"), [(6, 2), (6, 6), (3, 1), (1, 1)])
def test_gradients_take_two_hops_at_every_stage(stage: int, ranks: int, per_node: int) -> None:
    numel, nodes, steps = 12 * 64 * 64 // ranks, ranks // per_node, 2
    zero = {
        "zero_quantized_gradients": True,
        "zero_quantized_gradients_within_node": "e5m2",
        "zero_quantized_gradients_between_nodes": "int8",
        "zeropp_loco_param": {},
    }
    model = wide_blocks(1, 64)
    found = planned(model, ranks, per_node, zero, stage=stage, gradient_accumulation_steps=steps)
    plain = planned(model, ranks, per_node, stage=stage, gradient_accumulation_steps=steps)
    e5m2, int8 = 32 + numel // 128 * 130, 32 + numel // 256 * 258
    calls = steps * ((per_node > 1) + (nodes > 1))
    within, between = steps * (per_node - 1) * nodes * e5m2, steps * (nodes - 1) * int8
    expected = rows(plain)
    if ranks > 1:
        del expected["reduce_scatter of gradients"]
        expected["all_to_all of gradients"] = (calls, within, between)
    assert rows(found) == expected
    device = found.memory.device
    # What each hop loses, in 8 bits: of the whole gradient, and of a slice for each node.
    whole = ranks * numel // 256 * 258 if per_node > 1 else 0
    slices = nodes * numel // 256 * 258 if nodes > 1 else 0
    assert device.get("error feedback", 0) == whole + slices
    assert "exchange buffers" not in device


def test_what_a_message_in_any_hop_would_not_shorten_travels_as_it_is() -> None:
    for numel, is_short in ((128, False), (160, True)):
        with torch.device("meta"):
            model = nn.Sequential(nn.Sequential(nn.Linear(numel, 4, bias=False)))
        found, plain = (planned(model, 4, 2, zero) for zero in (ALL, {}))
        (gathered,) = [t for t in found.traffic if t.content == "parameters"]
        (exact,) = [t for t in plain.traffic if t.content == "parameters"]
        assert (gathered.sent_bytes < exact.sent_bytes) is is_short
        assert (gathered == exact) is not is_short
    with torch.device("meta"):
        model = nn.Sequential(nn.Sequential(nn.Linear(32, 4, bias=False)))
    assert rows(planned(model, 4, 2, ALL)) == rows(planned(model, 4, 2))
    with torch.device("meta"):
        model = nn.Sequential(nn.Sequential(nn.Linear(128, 4, bias=False)))
    zero: dict[str, Any] = {"zero_quantized_gradients": True}
    for within, is_quantized in (("int4", True), ("int8", False)):
        zero["zero_quantized_gradients_within_node"] = within
        found = rows(planned(model, 4, 2, zero, stage=2))
        assert ("all_to_all of gradients" in found) is is_quantized
        assert ("reduce_scatter of gradients" in found) is not is_quantized


@pytest.mark.parametrize("partition", [1, 4])
def test_on_one_node_messages_travel_and_changes_do_not(partition: int) -> None:
    numel = 12 * 64 * 64 // 4
    zero = {"zero_quantized_weights": True, "zero_hpz_partition_size": partition}
    found = planned(ONE_BLOCK, 4, 4, zero)
    message = 32 + numel // 256 * 258
    assert rows(found)["all_gather of parameters"] == (1, 3 * message, 0)
    assert found.memory.device["quantized weights"] == message
    change = planned(ONE_BLOCK, 4, 4, {**zero, "zero_quantized_weights_format": "int4_difference"})
    assert rows(change) == rows(planned(ONE_BLOCK, 4, 4))
    assert change.memory == planned(ONE_BLOCK, 4, 4).memory


def test_frozen_weights_alone_can_be_quantized() -> None:
    model = wide_blocks(2, 64)
    model[0].requires_grad_(False)
    shard = 2 * 12 * 64 * 64 // 4
    zero = {"zero_quantized_nontrainable_weights": True}
    message = 32 + shard // 2 // 256 * 258
    found = planned(model, 4, 2, zero)
    # The frozen block is gathered twice and in two phases, the other one once.
    calls, _, between = rows(found)["all_gather of parameters"]
    assert (calls, between) == (2 * 2 + 1, 2 * message + shard)
    assert found.memory.device["quantized weights"] == message
    as_changes = {**zero, "zero_quantized_weights_format": "int4_difference"}
    assert rows(planned(model, 4, 2, as_changes)) == rows(found)  # what never changes has none
    both = planned(model, 4, 2, {"zero_quantized_weights": True})
    assert between_nodes(both) < between_nodes(found) < between_nodes(planned(model, 4, 2))


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
    for choice in found.traffic_choices:
        changed = planned(model, 8, 4, choice.settings)
        assert choice.between_nodes_bytes == between_nodes(changed)
        assert choice.traffic == changed.traffic
        kinds = (
            *("secondary shards", "quantized weights", "published weights", "message buffers"),
            "error feedback",
        )
        assert choice.kept_bytes == sum(changed.memory.device.get(kind, 0) for kind in kinds)
    sent = [choice.between_nodes_bytes for choice in found.traffic_choices]
    assert sent[0] > max(sent[1:])
    assert sent[-1] == min(sent)
    for choice in found.traffic_choices:
        depends = any(choice.settings.get(f"zero_lossless_{of}") for of in ("weights", "gradients"))
        assert (choice.most_between_nodes_bytes > choice.between_nodes_bytes) == depends
    (table,) = [t for t in found.tables() if t.title.startswith("Traffic choices")]
    assert [row[0] for row in table.rows] == names
    each = [found.traffic, *(choice.traffic for choice in found.traffic_choices)]
    said = found.to_json().count('"between_nodes_bytes')
    assert said == sum(map(len, each)) + len(names)


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


def test_other_stages_are_planned_without_what_they_do_not_serve() -> None:
    zero = {**FOUR_BIT, "zero_hpz_partition_size": 2, "zeropp_loco_param": {}}
    found = planned(wide_blocks(2, 64), 4, 2, zero, device_type="accelerator")
    gradients = {k: v for k, v in zero.items() if "gradients" in k or "loco" in k}
    for stage in range(3):
        (choice,) = [c for c in found.choices if (c.stage, c.ratio) == (stage, 0.0)]
        alike = planned(wide_blocks(2, 64), 4, 2, gradients, stage=stage, device_type="accelerator")
        assert choice.device_bytes == alike.memory.device_bytes


def test_lossless_weights_are_planned_by_the_learning_rate() -> None:
    """About one of a weight's 16 bits is sent at a learning rate of 1e-5."""
    model = wide_blocks(3, 256)
    for stage in (1, 2, 3):
        plain, lossless = (
            planned(
                *(model, 4, 2, zero),
                stage=stage,
                optimizer={"type": "AdamW", "params": {"lr": 1e-5}},
            )
            for zero in ({}, {"zero_lossless_weights": True})
        )
        sent = [rows(found)["all_gather of parameters"][2] for found in (plain, lossless)]
        gathers = 1 if stage < 3 else 2  # of which the second stays within the node
        assert 0.055 < sent[1] / (sent[0] / gathers) < 0.085
        (choice,) = [c for c in plain.traffic_choices if c.name == "zero_lossless_weights"]
        assert choice.between_nodes_bytes == between_nodes(lossless)
        assert choice.between_nodes_bytes < choice.most_between_nodes_bytes
        assert choice.most_between_nodes_bytes <= between_nodes(plain)
