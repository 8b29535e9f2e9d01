"""Patches of weights whose optimizer, or whose shards, are on the host."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import zero_core
from zero_core.testing import Case, SimulatedRanks, batch, make_model, simulate, train

_CHECKS = {"check_grad_overflow": False}  # as updates in backward need it
OFFLOADED = {
    "host": {"offload_optimizer": {"device": "cpu"}},
    "twin": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "in backward": {"offload_optimizer": {"device": "cpu", "update_in_backward": True}},
    "bf16 moments": {"offload_optimizer": {"device": "cpu", "state_dtype": "bfloat16"}},
}


def _train(
    ranks: SimulatedRanks, stage: int, zero: dict[str, object], *, is_followed: bool
) -> dict[str, torch.Tensor]:
    top = {**_CHECKS, **({"weight_patches": {}} if is_followed else {})}
    case = Case(stage, "bf16", zero=zero, top=top)
    engine = zero_core.build(make_model(), case.config(), process_group=ranks)
    receiver = make_model().bfloat16()
    version = 0
    for step in range(6):
        train(engine, [batch(step, 0, ranks.rank)])
        if is_followed and step % 2:
            patch = engine.weight_patch(since=version)
            if ranks.rank == 0:
                zero_core.apply_patch(receiver, patch, version=None if version else 0)
            version = patch.version
            found = receiver.state_dict()
            for name, value in engine.full_state_dict(rank=0).items():
                assert torch.equal(found[name].view(torch.int16), value.view(torch.int16)), name
    return engine.full_state_dict()


def _check(stage: int, zero: dict[str, object]) -> None:
    followed, alone = (
        simulate(partial(_train, is_followed=is_followed), 2, stage, zero)[0]
        for is_followed in (True, False)
    )
    torch.testing.assert_close(followed, alone, rtol=0.0, atol=0.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", OFFLOADED)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_receiver_follows_an_offloaded_training_that_stays_the_same(stage, kind):
    _check(stage, OFFLOADED[kind])


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_a_receiver_follows_a_training_whose_parameters_rest_elsewhere(tmp_path, device):
    place = {"device": device, "nvme_path": str(tmp_path)}
    _check(3, {"offload_param": {**place, "max_in_cpu": 0}, "offload_optimizer": place})
