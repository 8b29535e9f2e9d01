"""Patches of weights whose optimizer, or whose shards, are on the host."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero_core
from zero_core.testing import Case, SimulatedRanks, batch, make_model, simulate

_CHECKS = {"check_grad_overflow": False}  # as updates in backward need it
OFFLOADED = {
    "host": {"offload_optimizer": {"device": "cpu"}},
    "twin": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "in backward": {"offload_optimizer": {"device": "cpu", "update_in_backward": True}},
    "bf16 moments": {"offload_optimizer": {"device": "cpu", "state_dtype": "bfloat16"}},
}


def _follow(ranks: SimulatedRanks, stage: int, zero: dict[str, object]) -> list[torch.Tensor]:
    case = Case(stage, "bf16", zero=zero, top={"weight_patches": {}, **_CHECKS})
    engine = zero_core.build(make_model(), case.config(), process_group=ranks)
    receiver = make_model().bfloat16()
    version = 0
    for step in range(6):
        engine.backward(engine(**batch(step, 0, ranks.rank))["loss"])
        engine.step()
        if step % 2:
            patch = engine.weight_patch(since=version)
            if ranks.rank == 0:
                zero_core.apply_patch(receiver, patch, version=None if version else 0)
            version = patch.version
            _assert_same(engine, receiver)
    return list(engine.full_state_dict().values())


def _assert_same(engine: zero_core.Engine, receiver: nn.Module) -> None:
    found = receiver.state_dict()
    for name, value in engine.full_state_dict(rank=0).items():
        assert torch.equal(found[name].view(torch.int16), value.view(torch.int16)), name


def _without(ranks: SimulatedRanks, stage: int, zero: dict[str, object]) -> list[torch.Tensor]:
    case = Case(stage, "bf16", zero=zero, top=_CHECKS)
    engine = zero_core.build(make_model(), case.config(), process_group=ranks)
    for step in range(6):
        engine.backward(engine(**batch(step, 0, ranks.rank))["loss"])
        engine.step()
    return list(engine.full_state_dict().values())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", OFFLOADED)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_receiver_follows_an_offloaded_training_that_stays_the_same(stage, kind):
    found = simulate(_follow, 2, stage, OFFLOADED[kind])
    expected = simulate(_without, 2, stage, OFFLOADED[kind])
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))


@pytest.mark.parametrize("params", ["cpu", "nvme"])
def test_a_receiver_follows_a_training_whose_parameters_rest_elsewhere(tmp_path, params):
    optimizer = {"device": params, "nvme_path": str(tmp_path)}
    zero = {"offload_param": {**optimizer, "max_in_cpu": 0}, "offload_optimizer": optimizer}
    if params == "cpu":
        zero = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    found = simulate(_follow, 2, 3, zero)
    expected = simulate(_without, 2, 3, zero)
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))
