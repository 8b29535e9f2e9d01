"""States of tiers of other packages leave the device and come back, too."""

from __future__ import annotations

from threading import Barrier
from typing import Any

import torch
from torch import Tensor

import zero_core
from zero_core.testing import Case, batch, late_device, make_model, run_alone, simulate

ZERO: list[dict[str, Any]] = [
    {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
]


def _train(ranks: Any, zero: dict[str, Any], sleeps: bool, done: Barrier) -> dict[str, Tensor]:
    config = Case(dtype="bf16", accumulation=2).config() | {"zero_optimization": zero}
    engine = zero_core.build(make_model(64), config, process_group=ranks)
    for micro in range(6):
        inputs = batch(micro // 2, micro % 2, ranks.rank)
        loss = engine(**{**inputs, "ids": inputs["ids"].to(ranks.device)})["loss"]
        engine.backward(loss)
        engine.step()
        if sleeps:
            before = torch.accelerator.memory_allocated(ranks.device)
            engine.offload_states()
            done.wait()
            assert torch.accelerator.memory_allocated(ranks.device) < 0.3 * before  # tiny tensors
            engine.reload_states()
            done.wait()
    values = engine.full_state_dict()
    engine.close()
    return values


def _compare() -> None:
    late_device.load()
    done = Barrier(2)
    for zero in ZERO:
        expected = simulate(_train, 2, zero, False, done, device="late")
        found = simulate(_train, 2, zero, True, done, device="late")
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_training_goes_on_with_the_same_bits() -> None:
    run_alone(_compare)
