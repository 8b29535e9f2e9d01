"""`create_collectives`: its entry point, its settings, and the settings that it refuses."""

import ast
import re
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from support.simulated_ranks import FOUR_BIT, QGZ, QWZ, Network, SimulatedTransport, hpz

import zero_comm
from zero_comm import create_collectives


def make(
    config: dict[str, Any], *, rank: int = 0, world_size: int = 4, ranks_per_node: int = 2
) -> tuple[Any, Any]:
    transport = SimulatedTransport(Network(world_size, 1), range(world_size), 0)
    made = create_collectives(
        transport,
        rank=rank,
        world_size=world_size,
        config=config,
        ranks_per_node=ranks_per_node,
        frozen=(),
    )
    return transport, made


def test_the_entry_point_is_the_factory() -> None:
    (found,) = entry_points(group="zero_core.collectives", name="quantized")
    assert found.load() is create_collectives


@pytest.mark.parametrize(
    ("config", "world_size"),
    [
        ({}, 4),
        ({"zero_quantized_weights": False}, 4),
        ({"zero_quantized_checksum": True}, 4),
        ({**QWZ, **QGZ, **hpz(2)}, 1),
    ],
)
def test_one_rank_or_a_config_that_asks_for_nothing_gets_the_native_collectives(
    config: dict[str, Any], world_size: int
) -> None:
    transport, collectives = make(config, world_size=world_size, ranks_per_node=1)
    assert collectives is transport


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("zero_quantized_gradients", 1),
        ("zero_quantized_nontrainable_weights", "no"),
        ("zero_hpz_partition_size", 3),
        ("zero_hpz_partition_size", 8),
        ("zero_hpz_partition_size", 0),
        ("zero_hpz_partition_size", True),
        ("zeropp_loco_param", {"beta": 0.8}),
        ("zeropp_loco_param", 0.8),
        ("zero_quantized_weights", "yes"),
        ("zero_quantized_weights_format", "int2"),
        ("zero_quantized_gradients_within_node", "int4_difference"),
        ("zero_quantized_gradients_between_nodes", 4),
        ("zeropp_loco_param.err_beta", 1.5),
        ("zeropp_loco_param.err_beta", "x"),
        ("zeropp_loco_param.reset_T", 0),
        ("zeropp_loco_param.reset_T", 2.0),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_its_key(key: str, value: object) -> None:
    outer, _, inner = key.partition(".")
    with pytest.raises(ValueError, match=rf"zero_optimization\.{re.escape(key)} "):
        make({**QWZ, **QGZ, outer: {inner: value} if inner else value})


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"rank": -1}, "rank must"),
        ({"rank": 4}, "rank must"),
        ({"ranks_per_node": 0}, "ranks_per_node must divide the 4 ranks"),
        ({"ranks_per_node": 3}, "ranks_per_node must divide the 4 ranks"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(layout: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(QWZ, **layout)


@pytest.mark.parametrize(
    ("config", "world_size", "per_node", "said"),
    [
        (hpz(4), 4, 4, "zero_hpz_partition_size = 4 has no effect"),
        (FOUR_BIT, 4, 4, "has no effect with one"),
        (hpz(2), 4, 1, "backward's gathers leave the node"),
        (hpz(2), 6, 3, "backward's gathers leave the node"),
    ],
)
def test_what_does_less_than_it_promises_is_said(
    config: dict[str, Any],
    world_size: int,
    per_node: int,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make(config, world_size=world_size, ranks_per_node=per_node)
    assert said in caplog.text


def test_nothing_is_imported_but_torch_and_the_standard_library() -> None:
    allowed = {"torch", "triton", "zero_comm", *sys.stdlib_module_names}
    for path in Path(zero_comm.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert {n.partition(".")[0] for n in names} <= allowed, path
