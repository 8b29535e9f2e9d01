"""Parameters that one rank alone can read after a step, at stages 0 to 2."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import zero_core
from zero_core.testing import Case, SimulatedRanks, batch, make_model, run_ddp, simulate


def _step(engine: zero_core.Engine, step: int, rank: int) -> None:
    engine.backward(engine(**batch(step, 0, rank))["loss"])
    engine.step()


def _one_rank_reads(ranks: SimulatedRanks, stage: int) -> None:
    expected = run_ddp(Case(), ranks.rank, 3, ranks).values
    engine = zero_core.build(make_model(), Case(stage).config(), process_group=ranks)
    for step in range(3):
        _step(engine, step, ranks.rank)
    if ranks.rank == ranks.size - 1:  # alone: a collective would never end
        found = engine.module.state_dict()
        again: dict[str, Tensor] = dict(engine.module.named_parameters())
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0.0, atol=0.0)
            assert torch.equal(again[name], value)
    _step(engine, 3, ranks.rank)  # and all goes on


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_one_rank_alone_reads_the_current_values(world_size, stage):
    simulate(_one_rank_reads, world_size, stage)


def _at_stage_3(ranks: SimulatedRanks) -> None:
    engine = zero_core.build(make_model(), Case(3).config(), process_group=ranks)
    _step(engine, 0, ranks.rank)
    before = engine.memory_report()
    engine.publish()
    assert engine.memory_report() == before
    with pytest.raises(RuntimeError, match="stage 3 holds only"):
        engine.module.embed.weight.sum()
    with pytest.raises(RuntimeError, match="full_state_dict"):
        engine.module.state_dict()


def test_at_stage_3_the_values_stay_sharded():
    simulate(_at_stage_3, 2)
