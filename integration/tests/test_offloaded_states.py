"""Offloading and reloading of states that other packages hold."""

from __future__ import annotations

from functools import partial
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

import zero_core
from zero_core.testing import Case, batch, late_device, make_model, run_alone, simulate

FOUR_BIT = {
    "zero_quantized_weights": True,
    "zero_quantized_weights_format": "int4_difference",
    "zero_hpz_partition_size": 2,
    "zero_quantized_gradients": True,
    "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 2},
}
ZERO: list[tuple[int, dict[str, Any]]] = [
    (2, {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
    (2, {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}),
    (4, {"stage": 3, **FOUR_BIT}),
]
KINDS = {"quantized weights", "secondary shards", "message buffers", "error feedback"}


def _train(
    ranks: Any, zero: dict[str, Any], sleeps: bool, done: Barrier
) -> tuple[dict[str, Tensor], set[str]]:
    config = Case(dtype="bf16", accumulation=2).config() | {"zero_optimization": zero}
    engine = zero_core.build(make_model(64), config, process_group=ranks)
    kinds: set[str] = set()
    for micro in range(6):
        inputs = batch(micro // 2, micro % 2, ranks.rank)
        loss = engine(**{**inputs, "ids": inputs["ids"].to(ranks.device)})["loss"]
        engine.backward(loss)
        engine.step()
        if sleeps:
            kinds |= KINDS & engine.memory_report().keys()
            before = torch.accelerator.memory_allocated(ranks.device)
            engine.offload_states()
            done.wait()
            assert torch.accelerator.memory_allocated(ranks.device) < 0.3 * before  # tiny tensors
            engine.reload_states()
            done.wait()
    values = engine.full_state_dict()
    engine.close()
    return values, kinds


def _compare() -> None:
    late_device.load()
    seen: set[str] = set()
    for world_size, zero in ZERO:
        done = Barrier(world_size)
        run = partial(simulate, _train, world_size, zero, device="late", ranks_per_node=2)
        expected, found = run(False, done), run(True, done)
        for (values, kinds), (exact, _) in zip(found, expected, strict=True):
            torch.testing.assert_close(values, exact, rtol=0, atol=0)
            seen |= kinds
    assert seen == KINDS


def test_training_goes_on_with_the_same_bits() -> None:
    run_alone(_compare)
