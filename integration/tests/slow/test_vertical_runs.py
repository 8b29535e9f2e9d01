"""200 steps with the vertical schedule have the bits of the horizontal one.

Clipping acts in none, some or all of the steps, fp16 steps overflow and are skipped, and a
checkpoint that one schedule saved is loaded by the other. Ranks are simulated.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from zero_core.testing import SimulatedRanks, seeded, simulate

STEPS, SAVED, WIDTH, MICRO_STEPS = 200, 120, 8, 3
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 1e-3},
    "AdamW": {"lr": 1e-3, "weight_decay": 0.1},
    "Adagrad": {"lr": 1e-2},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
    "Lion": {"lr": 1e-4},
}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class _Net(nn.Module):
    """Predicts the next of few symbols, with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(0):
            self.embed = nn.Embedding(13, WIDTH)
            self.blocks = nn.ModuleList(_Block() for _ in range(3))
            self.head = nn.Linear(WIDTH, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _batches(step: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    sizes = [(1 + (step + n) % 3, 4 + n) for n in range(MICRO_STEPS)]
    return [torch.randint(0, 13, size, generator=generator) for size in sizes]


def _train(
    ranks: SimulatedRanks, net: nn.Module, config: dict[str, Any], saved: Path, loaded: Path | None
) -> tuple[list[float], list[float], int, dict[str, Tensor]]:
    engine = zero_core.build(net, config, process_group=ranks)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(engine.train_batch(_batches(step, ranks.rank)).item())
        norms.append(engine.get_global_grad_norm() or 0.0)
        if step == SAVED:
            engine.save_checkpoint(saved)
            if loaded is not None:
                engine.load_checkpoint(loaded)
    values = engine.full_state_dict(dtype=torch.float32)
    engine.close()
    return losses, norms, engine.skipped_steps, values


def _compare(ranks: SimulatedRanks, config: dict[str, Any], folder: Path) -> list[float]:
    nets = _Net(), _Net()
    at_first, then = folder / "horizontal", folder / "vertical"
    expected = _train(ranks, nets[0], config, at_first, None)
    vertical = config | {"accumulation_schedule": "vertical"}
    found = _train(ranks, nets[1], vertical, then, at_first)
    assert found[0] == expected[0]
    assert list(map(repr, found[1])) == list(map(repr, expected[1]))  # NaN is NaN
    assert found[2] == expected[2]
    torch.testing.assert_close(found[3], expected[3], rtol=0.0, atol=0.0)
    return [*expected[1], float(expected[2])]


def _config(stage: int, optimizer: str, clipping: float, dtype: str) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_STEPS,
        "gradient_clipping": clipping,
        "optimizer": {"type": optimizer, "params": OPTIMIZERS[optimizer]},
        "zero_optimization": {"stage": stage},
        "activation_checkpointing": {},
    }
    if dtype == "fp16":  # whose scale doubles until a step overflows
        fp16 = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 20}
        config["fp16"] = {**fp16, "hysteresis": 1}
    return config


CASES = list(itertools.product([1, 2, 3], [1, 2, 3]))
NAMES = list(itertools.islice(itertools.cycle(OPTIMIZERS), len(CASES)))


@pytest.mark.parametrize(
    ("world_size", "stage", "optimizer"),
    [(*case, name) for case, name in zip(CASES, NAMES, strict=True)],
)
def test_200_steps_have_the_bits_of_the_horizontal_schedule(
    world_size: int, stage: int, optimizer: str, tmp_path: Path
) -> None:
    clipping = 0.0
    for share in ("none", "some", "all"):
        config = _config(stage, optimizer, clipping, "fp32")
        *norms, _ = simulate(_compare, world_size, config, tmp_path / share)[0]
        num_clipped = sum(norm > clipping > 0.0 for norm in norms)
        assert {"none": num_clipped == 0, "some": 0 < num_clipped < STEPS / 2}.get(
            share, num_clipped == STEPS
        )
        clipping = sorted(norms)[int(0.9 * STEPS)] if share == "none" else 1e-6
    config = _config(stage, optimizer, 0.0, "fp16")
    *_, num_skipped = simulate(_compare, world_size, config, tmp_path / "fp16")[0]
    assert 0 < num_skipped < STEPS
