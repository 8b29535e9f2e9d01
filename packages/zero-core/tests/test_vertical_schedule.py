"""The vertical schedule: the bits of the horizontal one, and each unit gathered twice per step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from zero_core.testing import SimulatedRanks, seeded, simulate

WIDTH, VOCAB, DEPTH = 10, 37, 3


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH, bias=False)

    def forward(self, x: Tensor, *, bias: Tensor, mask: Tensor) -> tuple[Tensor, None]:
        scores = self.mix(self.norm(x)) @ x.transpose(1, 2) + bias + bias.square()
        x = x + scores.masked_fill(mask, float("-inf")).softmax(-1) @ x
        return x + self.down(torch.nn.functional.gelu(self.up(x))), None


class _Net(nn.Module):
    """A language model with tied weights, and a bias that the blocks share and learn."""

    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        with seeded(0):
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.bias = nn.Embedding(16, 1)
            self.blocks = nn.ModuleList(_Block() for _ in range(DEPTH))
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        given, wanted = ids[:, :-1], ids[:, 1:]
        x, places = self.embed(given), torch.arange(given.shape[1], device=ids.device)
        bias = self.bias((places[:, None] - places).abs()).squeeze(-1)
        mask = places[:, None] < places
        for block in self.blocks:
            x, _ = block(x, bias=bias, mask=mask)
        logits = self.head(self.norm(x))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())}


def _batches(step: int, rank: int, number: int) -> list[dict[str, Tensor]]:
    """Micro-batches of other sizes each."""
    found = []
    for micro in range(number):
        generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
        size = (1 + (step + micro) % 3, 5 + micro)
        found.append({"ids": torch.randint(0, VOCAB, size, generator=generator)})
    return found


def _config(stage: int, **further: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
        "activation_checkpointing": {},
        **further,
    }


def _train(
    ranks: SimulatedRanks, config: dict[str, Any], steps: int, model: _Net
) -> tuple[list[float], dict[str, Tensor], list[str], int]:
    engine = zero_core.build(model, config, process_group=ranks)
    losses, norms = [], []
    for step in range(steps):
        k = engine.gradient_accumulation_steps
        losses.append(engine.train_batch(_batches(step, ranks.rank, k)).item())
        norms.append(repr(engine.get_global_grad_norm()))  # NaN is NaN
    return losses, engine.full_state_dict(dtype=torch.float32), norms, engine.skipped_steps


def _same_bits(
    ranks: SimulatedRanks, config: dict[str, Any], steps: int, model: dict[str, Any]
) -> None:
    nets = _Net(**model), _Net(**model)  # before any rank trains: they share a generator
    horizontal = _train(ranks, config, steps, nets[0])
    vertical = _train(ranks, config | {"accumulation_schedule": "vertical"}, steps, nets[1])
    assert vertical[0] == horizontal[0]
    assert vertical[2:] == horizontal[2:]
    torch.testing.assert_close(vertical[1], horizontal[1], rtol=0.0, atol=0.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_bits_are_those_of_the_horizontal_schedule(world_size, stage, is_tied):
    simulate(_same_bits, world_size, _config(stage), 4, {"is_tied": is_tied})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_bits_are_the_same_at_every_precision_with_clipping_and_overflow(world_size, stage, dtype):
    further: dict[str, Any] = {"gradient_clipping": 0.5}
    if dtype != "fp32":
        further[dtype] = {"enabled": True}
    if dtype == "fp16":  # whose first steps overflow
        further["fp16"] |= {"hysteresis": 1, "initial_scale_power": 18}
    simulate(_same_bits, world_size, _config(stage, **further), 8, {"is_tied": True})


def _overflows(ranks: SimulatedRanks) -> None:
    further = {"fp16": {"enabled": True, "hysteresis": 1, "initial_scale_power": 18}}
    config = _config(3, accumulation_schedule="vertical", **further)
    *_, num_skipped = _train(ranks, config, 10, _Net())
    assert 0 < num_skipped < 10


def test_steps_of_fp16_overflow_and_are_skipped():
    simulate(_overflows, 2)


def _gathers_twice(ranks: SimulatedRanks, micro_steps: int) -> None:
    config = _config(3, gradient_accumulation_steps=micro_steps)
    found = {}
    for schedule in ("horizontal", "vertical"):
        config["accumulation_schedule"] = schedule
        engine = zero_core.build(_Net(is_tied=False), config, process_group=ranks)
        for step in range(3):
            engine.train_batch(_batches(step, ranks.rank, micro_steps))
        with torch.device("meta"):
            model = _Net(is_tied=False)
        planned = zero_core.plan(model, config, ranks.size, device_type="cpu").traffic
        rows = {(row.collective, row.content): row for row in engine.comm_report()}
        assert {(row.collective, row.content): row for row in planned} == rows
        found[schedule] = rows["all_gather", "parameters"]
        engine.close()
    assert found["horizontal"].num_calls == micro_steps * found["vertical"].num_calls
    assert found["horizontal"].sent_bytes == micro_steps * found["vertical"].sent_bytes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("micro_steps", [2, 5])
@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_are_gathered_in_two_passes_per_step_however_many_micro_batches(
    world_size, micro_steps
):
    simulate(_gathers_twice, world_size, micro_steps)


def _like_a_loop(ranks: SimulatedRanks, stage: int) -> None:
    nets = _Net(), _Net()
    engine = zero_core.build(nets[0], _config(stage), process_group=ranks)
    for step in range(3):
        for batch in _batches(step, ranks.rank, 3):
            engine.backward(engine(**batch)["loss"])
            engine.step()
    vertical = _train(ranks, _config(stage, accumulation_schedule="vertical"), 3, nets[1])
    torch.testing.assert_close(
        vertical[1], engine.full_state_dict(dtype=torch.float32), rtol=0.0, atol=0.0
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_bits_are_those_of_a_loop_of_forward_backward_and_step(stage):
    simulate(_like_a_loop, 2, stage)
