"""Parameters that rest in a file: gathered a few at a time, changed, and only evaluated."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch

import zero_core
from zero_core.testing import Case, batch, make_model, spawn


def _config(folder: str) -> dict[str, Any]:
    zero = {
        "offload_param": {"device": "nvme", "nvme_path": folder},
        "offload_optimizer": {"device": "cpu"},
        "stage3_param_persistence_threshold": 0,
    }
    return Case(3, "bf16", zero=zero).config()


def _evaluates(rank: int, folder: str) -> None:
    engine = zero_core.build(make_model(), _config(folder), is_training=False)
    plain = make_model().to(torch.bfloat16)
    for step in range(2):
        with torch.no_grad():
            expected = plain(**batch(step, 0, rank))["logits"]
        assert torch.equal(engine(**batch(step, 0, rank))["logits"], expected)
    report = engine.memory_report()
    assert report["host parameters"] > 0
    assert "parameters" not in report
    engine.close()


def _gathers(rank: int, folder: str, modifier: int) -> None:
    engine = zero_core.build(make_model(), _config(folder))
    for step in range(2):
        engine.backward(engine(**batch(step, 0, rank))["loss"])
        engine.step()
    wanted = [engine.module.embed.weight, engine.module.blocks[2].up.bias]
    with engine.gathered():
        expected = [p.detach().clone() for p in wanted]
    masters = engine.full_state_dict(dtype=torch.float32)
    with engine.gathered(params=wanted, modifier_rank=modifier), torch.no_grad():
        torch.testing.assert_close([p.detach() for p in wanted], expected, rtol=0.0, atol=0.0)
        if rank == modifier:
            wanted[0][1] = 2.0
    expected[0][1] = masters["embed.weight"][1] = masters["head.weight"][1] = 2.0
    with engine.gathered():
        torch.testing.assert_close([p.detach() for p in wanted], expected, rtol=0.0, atol=0.0)
    found = engine.full_state_dict(dtype=torch.float32)
    torch.testing.assert_close(found, masters, rtol=0.0, atol=0.0)
    engine.backward(engine(**batch(2, 0, rank))["loss"])
    engine.step()
    engine.close()


def _both(rank: int, world_size: int, folder: str) -> None:
    _evaluates(rank, folder)
    _gathers(rank, folder, world_size - 1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_values_that_rest_in_a_file_are_gathered_changed_and_evaluated(world_size):
    with tempfile.TemporaryDirectory() as folder:
        spawn(_both, world_size, folder)
