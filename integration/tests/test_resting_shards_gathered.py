"""Parameters that rest in a file: gathered a few at a time, changed, and only evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zero_core
from zero_core.testing import (
    Case,
    SimulatedRanks,
    Tower,
    batch,
    make_model,
    make_tower,
    rows,
    simulate,
    train,
)


def _config(folder: str) -> dict[str, Any]:
    zero = {
        "offload_param": {"device": "nvme", "nvme_path": folder},
        "offload_optimizer": {"device": "cpu"},
        "stage3_param_persistence_threshold": 0,
    }
    return Case(3, "bf16", zero=zero).config()


def _evaluates(ranks: SimulatedRanks, folder: str) -> None:
    engine = zero_core.build(make_model(), _config(folder), is_training=False, process_group=ranks)
    plain = make_model().to(torch.bfloat16)
    for step in range(2):
        with torch.no_grad():
            expected = plain(**batch(step, 0, ranks.rank))["logits"]
        assert torch.equal(engine(**batch(step, 0, ranks.rank))["logits"], expected)
    report = engine.memory_report()
    assert report["host parameters"] > 0
    assert "parameters" not in report
    engine.close()


def _gathers(ranks: SimulatedRanks, folder: str) -> None:
    modifier = ranks.size - 1
    engine = zero_core.build(make_model(), _config(folder), process_group=ranks)
    train(engine, [batch(step, 0, ranks.rank) for step in range(2)])
    wanted = [engine.module.embed.weight, engine.module.blocks[2].up.bias]
    with engine.gathered():
        expected = [p.detach().clone() for p in wanted]
    masters = engine.full_state_dict(dtype=torch.float32)
    with engine.gathered(params=wanted, modifier_rank=modifier), torch.no_grad():
        torch.testing.assert_close([p.detach() for p in wanted], expected, rtol=0.0, atol=0.0)
        if ranks.rank == modifier:
            wanted[0][1] = 2.0
    expected[0][1] = masters["embed.weight"][1] = masters["head.weight"][1] = 2.0
    with engine.gathered():
        torch.testing.assert_close([p.detach() for p in wanted], expected, rtol=0.0, atol=0.0)
    found = engine.full_state_dict(dtype=torch.float32)
    torch.testing.assert_close(found, masters, rtol=0.0, atol=0.0)
    train(engine, [batch(2, 0, ranks.rank)])
    engine.close()


@pytest.mark.parametrize("does", [_evaluates, _gathers])
@pytest.mark.parametrize("world_size", [1, 2])
def test_values_that_rest_in_a_file_are_gathered_changed_and_evaluated(world_size, does, tmp_path):
    simulate(does, world_size, str(tmp_path))


def _partly_frozen() -> Tower:
    """Return blocks of a frozen layer of 72 elements and a trained one of 70."""
    model = make_tower(2)
    for block in model.blocks:
        block[0].requires_grad_(False)
    return model


def test_a_unit_that_rests_in_part_trains_on_after_it_was_gathered(tmp_path: Path) -> None:
    x = rows(0, 0)
    plain = _partly_frozen()
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.5)
    zero = {
        "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)},
        "stage3_param_persistence_threshold": 71,
    }
    sgd = {"type": "SGD", "params": {"lr": 0.5}}
    engine = zero_core.build(_partly_frozen(), Case(3, zero=zero, top={"optimizer": sgd}).config())
    model = engine.module
    for step in range(4):
        expected, found = plain(x), engine(x)
        torch.testing.assert_close(found, expected)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(found)
        engine.step()
        for params in (list(model.parameters()), [model.blocks[1][3].weight]):
            with engine.gathered(params=params, modifier_rank=0 if step == 2 else None):
                assert all(map(engine.holds_value, params))
                if step == 2:
                    model.blocks[1][3].weight.data[3] = 0.25
        with pytest.raises(RuntimeError, match=r"blocks\.0\.0\.weight was read"):
            model.blocks[0][0].weight.norm()
        assert engine.holds_value(model.blocks[0][3].weight)
        if step == 2:
            plain.blocks[1][3].weight.data[3] = 0.25
    engine.close()
