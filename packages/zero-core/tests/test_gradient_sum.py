"""``gradient_allreduce_op``: with "sum" the ranks' gradients add up, at every stage."""

from __future__ import annotations

import pytest
import torch

import zero_core
from zero_core.testing import Case, SimulatedDDP, SimulatedRanks, batch, make_model, simulate


def _summed(ranks: SimulatedRanks, stage: int) -> None:
    model = make_model()
    ddp = SimulatedDDP(model, ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * ranks.size)
    for step in range(2):
        optimizer.zero_grad()
        ddp(**batch(step, 0, ranks.rank))["loss"].backward()
        ddp.average_gradients()
        optimizer.step()
    other = make_model()
    engine = zero_core.build(
        other,
        {**Case(stage=stage).config(), "gradient_allreduce_op": "sum"},
        optimizer=torch.optim.SGD(other.parameters(), lr=0.01),
        process_group=ranks,
    )
    for step in range(2):
        engine.backward(engine(**batch(step, 0, ranks.rank))["loss"])
        engine.step()
    full = engine.full_state_dict()
    for name, param in model.named_parameters():
        torch.testing.assert_close(full[name], param.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_sum_steps_as_far_as_ddp_does_with_a_rate_times_the_ranks(world_size, stage):
    simulate(_summed, world_size, stage)
