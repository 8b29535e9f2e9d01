"""A plan of the vertical schedule: one pass of gathers, all micro-batches' inputs of blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import zero_core
from zero_core.plan.rates import Calibration, Curve, Rates

WIDTH, DEPTH, ROWS = 8, 3, 5
INPUT_BYTES = ROWS * WIDTH * 4


class _Net(nn.Module):
    """Notes the inputs of its blocks, and how many of them are alive behind the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
            for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embed.weight
        self.given: list[StorageWeakRef] = []
        self.num_alive: list[int] = []

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            if x.device.type != "meta":
                self.given.append(StorageWeakRef(x.untyped_storage()))
            x = block(x)
        self.num_alive.append(sum(not ref.expired() for ref in self.given))
        return self.head(x).square().mean()


def _config(schedule: str, steps: int = 4, **further: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": steps,
        "accumulation_schedule": schedule,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3},
        "activation_checkpointing": {},
        **further,
    }


def _plan(schedule: str, steps: int = 4) -> zero_core.Plan:
    with torch.device("meta"):
        model, inputs = _Net(), [torch.zeros(ROWS, dtype=torch.long)]
    return zero_core.plan(
        model, _config(schedule, steps), 2, device_type="cpu", example_inputs=inputs
    )


def test_inputs_of_blocks_are_counted_for_all_micro_batches():
    found = {n: _plan("vertical", n).memory.device["activations"] for n in (1, 2, 4)}
    # With a gradient between two blocks each; the embedding saves its indices.
    per_micro_batch = DEPTH * INPUT_BYTES + INPUT_BYTES + ROWS * 8
    assert found[4] - found[2] == 2 * per_micro_batch
    assert found[2] - found[1] == per_micro_batch + INPUT_BYTES
    assert found[1] == _plan("horizontal", 4).memory.device["activations"]


def test_inputs_of_blocks_of_all_micro_batches_are_kept_and_then_freed():
    engine = zero_core.build(_Net(), _config("vertical"))
    engine.train_batch([torch.arange(ROWS) for _ in range(4)])
    # Behind the blocks micro-batches come one by one.
    assert engine.module.num_alive[0] == 4 * DEPTH
    assert all(ref.expired() for ref in engine.module.given)


def test_gradients_of_tied_weights_are_counted_for_all_micro_batches():
    kinds = _plan("vertical").memory.device
    assert kinds["gradients of tied weights"] == 4 * 16 * WIDTH * 4
    assert "gradients of tied weights" not in _plan("horizontal").memory.device


def _rates(gather: float) -> Calibration:
    free, link = Curve(((1.0, 0.0),)), Curve.of_rate(gather)
    names = ("memory.float32", "matmul.float32", "pass", "step", "agree.within", "copy.to_host")
    curves = {
        **dict.fromkeys((*names, "copy.to_device", "reduce.within"), free),
        **dict.fromkeys(("update.host.float32", "update.device.float32"), free),
        "operator": Curve(((1.0, 1e-6),)),
        "gather.within": link,
    }
    return Calibration("an accelerator", "by hand", (Rates(1, 1, None, curves),))


@pytest.mark.parametrize("steps", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_step_that_gathers_bound_takes_one_pass_of_gathers(steps):
    found = {}
    for schedule in ("horizontal", "vertical"):
        with torch.device("meta"):
            model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.zeros(8, 64)
        config = _config(schedule, steps) | {"train_micro_batch_size_per_gpu": 8}
        plan = zero_core.plan(model, config, 2, example_inputs=[x], calibration=_rates(1e6))
        assert plan.configured.step_time is not None
        found[schedule] = plan.configured.step_time
    assert found["horizontal"].lanes["gather"] == pytest.approx(
        steps * found["vertical"].lanes["gather"]
    )
    assert found["vertical"].total_s < found["horizontal"].total_s / (steps / 1.5)
