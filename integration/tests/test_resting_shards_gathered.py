"""Parameters that rest in a file: gathered a few at a time, changed, and only evaluated."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


class _Block(nn.Module):
    """A frozen layer, whose values rest, and a smaller trained one, whose values are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(9, 9).requires_grad_(False)
        self.adapter = nn.Linear(9, 9, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.adapter(x))


class _Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_a_unit_that_rests_in_part_trains_on_after_it_was_gathered(tmp_path: Path) -> None:
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    plain = _Adapted()
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.5)
    zero = {
        "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)},
        "stage3_param_persistence_threshold": 85,
    }
    sgd = {"type": "SGD", "params": {"lr": 0.5}}
    engine = zero_core.build(_Adapted(), Case(3, zero=zero, top={"optimizer": sgd}).config())
    model = engine.module
    for step in range(4):
        expected, found = plain(x), engine(x)
        torch.testing.assert_close(found, expected)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(found)
        engine.step()
        for params in (list(model.parameters()), [model.blocks[1].adapter.weight]):
            with engine.gathered(params=params, modifier_rank=0 if step == 2 else None):
                assert all(map(engine.holds_value, params))
                if step == 2:
                    params[-1].data[3] = 0.25
        with pytest.raises(RuntimeError, match=r"blocks\.0\.base\.weight was read"):
            model.blocks[0].base.weight.norm()
        assert engine.holds_value(model.blocks[0].adapter.weight)
        if step == 2:
            plain.blocks[1].adapter.weight.data[3] = 0.25
    engine.close()
