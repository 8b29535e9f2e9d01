"""What one rank changes within ``gathered(modifier_rank=...)`` is what every rank trains on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zero_core
from zero_core.testing import Case, SimulatedRanks, batch, make_model, simulate


def _change(model: nn.Module) -> None:
    with torch.no_grad():
        model.embed.weight[3:20] *= 1.5  # tied, and its slices lie on several ranks
        model.blocks[1].up.bias.fill_(0.25)
        model.frozen[0].down.weight.add_(0.125)
        model.never[2] = 7.0


def _train(engine: zero_core.Engine, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(**batch(step, 0, rank))["loss"]
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _restarted(ranks: SimulatedRanks) -> tuple[list[float], dict[str, Tensor]]:
    """The oracle: an engine built from the changed model."""
    model = make_model()
    if ranks.rank == 0:  # whose values build() takes
        _change(model)
    engine = zero_core.build(model, Case().config(), process_group=ranks)
    return _train(engine, ranks.rank, range(3)), engine.full_state_dict()


def _reaches_all(ranks: SimulatedRanks, modifier: int, stage: int) -> None:
    losses, values = _restarted(ranks)
    engine = zero_core.build(make_model(), Case(stage=stage).config(), process_group=ranks)
    with engine.gathered(modifier_rank=modifier) as model:
        if ranks.rank == modifier:
            _change(model)
    assert _train(engine, ranks.rank, range(3)) == losses
    torch.testing.assert_close(engine.full_state_dict(), values, rtol=0.0, atol=0.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("world_size", "modifier"), [(1, 0), (2, 0), (2, 1), (3, 2)])
def test_a_change_before_the_first_step_is_as_if_built_with_it(world_size, modifier, stage):
    simulate(_reaches_all, world_size, modifier, stage)


def _keeps_master_weights(ranks: SimulatedRanks, stage: int) -> None:
    engine = zero_core.build(
        make_model(), Case(stage=stage, dtype="bf16").config(), process_group=ranks
    )
    _train(engine, ranks.rank, range(2))
    before = engine.full_state_dict(dtype=torch.float32)
    with engine.gathered() as model:
        expected = {n: p.detach().float() for n, p in model.named_parameters()}
    with engine.gathered(modifier_rank=0) as model, torch.no_grad():
        if ranks.rank == 0:
            model.gain.fill_(3.0)
            model.head.weight[5] = 0.5
    expected["gain"] = torch.full((1,), 3.0)
    expected["embed.weight"][5] = 0.5
    after = engine.full_state_dict(dtype=torch.float32)
    before["gain"] = torch.full((1,), 3.0)
    before["embed.weight"][5] = before["head.weight"][5] = 0.5
    torch.testing.assert_close(after, before, rtol=0.0, atol=0.0)
    with engine.gathered() as model:
        now = {n: p.detach().float() for n, p in model.named_parameters()}
    torch.testing.assert_close(now, expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("stage", range(4))
def test_untouched_master_weights_keep_the_bits_that_bf16_lacks(stage):
    simulate(_keeps_master_weights, 2, stage)


def test_a_rank_that_does_not_exist_is_refused():
    engine = zero_core.build(make_model(), Case().config())
    with pytest.raises(ValueError, match="modifier_rank = 1"), engine.gathered(modifier_rank=1):
        pass
