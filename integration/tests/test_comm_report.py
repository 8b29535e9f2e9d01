"""An engine's reports of bytes sent and kept, compared with its plan."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from torch import nn

import zero_core
from zero_core.testing import Case, SimulatedRanks, make_tower, rows, simulate

WIDTH = 64
WEIGHTS, GRADIENTS = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
HPZ = {"zero_hpz_partition_size": 2}
FOUR_BIT = {
    **WEIGHTS,
    **GRADIENTS,
    "zero_quantized_weights_format": "int4_difference",
    "zero_quantized_gradients_within_node": "int8",
    "zero_quantized_gradients_hadamard": True,
}
KINDS = ("secondary shards", "quantized weights", "message buffers", "error feedback")


def make_config(stage: int, gradient_accumulation_steps: int = 1, **zero: Any) -> dict[str, Any]:
    return Case(stage, "bf16", gradient_accumulation_steps, zero=zero).config()


CONFIGS = [
    *[make_config(stage, **way) for stage in range(4) for way in ({}, GRADIENTS)],
    make_config(3, **HPZ),
    make_config(3, **HPZ, gradient_accumulation_steps=2),
    make_config(3, zero_hpz_partition_size=4, **WEIGHTS),
    *[
        make_config(3, zero_quantized_weights_format=kind, **WEIGHTS, **further)
        for kind in ("int8", "e5m2", "int4_difference")
        for further in ({}, HPZ)
    ],
    make_config(3, zero_quantized_nontrainable_weights=True),
    make_config(3, zero_quantized_nontrainable_weights=True, **HPZ),
    make_config(3, zeropp_loco_param={}, **WEIGHTS, **GRADIENTS, **HPZ),
    make_config(3, **FOUR_BIT, **HPZ, gradient_accumulation_steps=2),
    make_config(2, **GRADIENTS, zeropp_loco_param={}, zero_quantized_checksum=True),
]


def make() -> nn.Module:
    """Return a root too small to be quantized and blocks that are not, one of them frozen."""
    model = make_tower(3, WIDTH)
    model.blocks[1].requires_grad_(False)
    return model


def train(config: dict[str, Any], ranks: SimulatedRanks | None = None) -> dict[str, Any]:
    engine = zero_core.build(make(), config, process_group=ranks)
    for _ in range(2):  # the first one has nothing to tell changes of
        for _ in range(engine.gradient_accumulation_steps):
            engine.backward(engine(rows(0, 0, WIDTH).bfloat16()))
            engine.step()
    memory = engine.memory_report()
    return {
        "sent": [asdict(row) for row in engine.comm_report()],
        "held": {kind: memory[kind] for kind in KINDS if memory.get(kind)},
    }


def train_served(ranks: Any) -> list[dict[str, Any]]:
    return [train(config, ranks) for config in served_by(ranks.size)]


def served_by(world_size: int) -> list[dict[str, Any]]:
    """Return configurations whose partition divides the ranks."""
    key = "zero_hpz_partition_size"
    return [c for c in CONFIGS if world_size % c["zero_optimization"].get(key, 1) == 0]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(4, 2), (3, 1), (2, 2)])
def test_an_engine_sends_and_keeps_what_was_planned(world_size: int, ranks_per_node: int) -> None:
    served = served_by(world_size)
    found = simulate(train_served, world_size, ranks_per_node=ranks_per_node)
    plans = [
        zero_core.plan(make(), c, world_size, ranks_per_node=ranks_per_node, device_type="cpu")
        for c in served
    ]
    for of_rank in found:
        for config, planned, row in zip(served, plans, of_rank, strict=True):
            zero, device = config["zero_optimization"], planned.memory.device
            assert [asdict(t) for t in planned.traffic] == row["sent"], zero
            assert {kind: device[kind] for kind in KINDS if kind in device} == row["held"], zero
