"""What an engine says that it has sent and keeps, against the plan, on four ranks of two nodes.

Ranks of several nodes are simulated, those of one node are processes.
"""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from zero_core.testing import SimulatedRanks, simulate, spawn

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


def make_config(stage: int, **further: Any) -> dict[str, Any]:
    steps = further.pop("gradient_accumulation_steps", 1)
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": steps,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, **further},
    }


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


class Block(nn.Module):
    """A weight that is quantized, and a norm beside it."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, factor * WIDTH)
        self.down = nn.Linear(factor * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


class Model(nn.Module):
    """A root too small to be quantized, uneven blocks, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(factor) for factor in (2, 5, 3))
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.norm(x)
        return y


torch.manual_seed(0)
MODEL = Model()


def train(config: dict[str, Any], ranks: SimulatedRanks | None = None) -> dict[str, Any]:
    engine = zero_core.build(copy.deepcopy(MODEL), config, process_group=ranks)
    for _ in range(2):  # the first one has nothing to tell changes of
        for _ in range(engine.gradient_accumulation_steps):
            x = torch.randn(2, WIDTH).bfloat16()
            engine.backward(engine(x).float().square().mean())
            engine.step()
    memory = engine.memory_report()
    return {
        "sent": [asdict(row) for row in engine.comm_report()],
        "held": {kind: memory[kind] for kind in KINDS if memory.get(kind)},
    }


def served_by(world_size: int) -> list[dict[str, Any]]:
    """Configurations whose partition divides the ranks."""
    key = "zero_hpz_partition_size"
    return [c for c in CONFIGS if world_size % c["zero_optimization"].get(key, 1) == 0]


def train_served(rank: int, world_size: int, folder: str) -> None:
    found = [train(config) for config in served_by(world_size)]
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))


def train_simulated(ranks: SimulatedRanks) -> list[dict[str, Any]]:
    return [train(config, ranks) for config in served_by(ranks.size)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "ranks_per_node"),
    [
        (4, 2),
        pytest.param(3, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
    ],
)
def test_an_engine_sends_and_keeps_what_was_planned(
    world_size: int, ranks_per_node: int, tmp_path: Path
) -> None:
    served = served_by(world_size)
    if world_size > ranks_per_node:
        found = simulate(train_simulated, world_size, ranks_per_node=ranks_per_node)
    else:
        spawn(train_served, world_size, str(tmp_path))
        found = [json.loads((tmp_path / f"{r}.json").read_text()) for r in range(world_size)]
    with torch.device("meta"):
        model = Model()
    plans = [
        zero_core.plan(model, c, world_size, ranks_per_node=ranks_per_node, device_type="cpu")
        for c in served
    ]
    for rows in found:
        for config, planned, row in zip(served, plans, rows, strict=True):
            zero, device = config["zero_optimization"], planned.memory.device
            assert [asdict(t) for t in planned.traffic] == row["sent"], zero
            assert {kind: device[kind] for kind in KINDS if kind in device} == row["held"], zero
