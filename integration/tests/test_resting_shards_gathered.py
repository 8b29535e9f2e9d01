"""Parameters that rest in a file: gathered a few at a time, changed, and only evaluated.

That training and `gathered` change no bit is shown by rows of test_equalities.py.
"""

from __future__ import annotations

from pathlib import Path

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
    on_ranks,
    rows,
)


@on_ranks(2)
def test_values_that_rest_in_a_file_are_evaluated(ranks: SimulatedRanks, tmp_path: Path) -> None:
    offload = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
    config = Case(3, "bf16", zero={**offload, "stage3_param_persistence_threshold": 0}).config()
    engine = zero_core.build(make_model(), config, is_training=False, process_group=ranks)
    plain = make_model().to(torch.bfloat16)
    for step in range(2):
        with torch.no_grad():
            expected = plain(**batch(step, 0, ranks.rank))["logits"]
        assert torch.equal(engine(**batch(step, 0, ranks.rank))["logits"], expected)
    report = engine.memory_report()
    assert report["host parameters"] > 0
    assert "parameters" not in report
    engine.close()


def _partly_frozen() -> Tower:
    """Return blocks of a frozen layer of 72 elements and a trained one of 70."""
    model = make_tower(2)
    for block in model.blocks:
        block[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_a_unit_that_rests_in_part_trains_on_after_it_was_gathered(ranks, tmp_path):
    x = rows(0, 0)
    plain = _partly_frozen()
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.5)
    zero = {
        "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)},
        "stage3_param_persistence_threshold": 71,
    }
    sgd = {"type": "SGD", "params": {"lr": 0.5}}
    config = Case(3, zero=zero, top={"optimizer": sgd}).config()
    engine = zero_core.build(_partly_frozen(), config, process_group=ranks)
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
        assert engine.holds_value(model.blocks[0][3].weight) is (ranks.size == 1)
        if step == 2:
            plain.blocks[1][3].weight.data[3] = 0.25
    engine.close()
