"""A forward or a backward that raises, and Ctrl-C in a forward, leave an engine that goes on."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import zero_core
from zero_core.testing import (
    Case,
    SimulatedRanks,
    Tower,
    on_ranks,
    rows,
    seeded,
    simulate,
    train,
)


def _fail(grad: Tensor) -> None:
    raise ArithmeticError("breaks off")


class _Breaking(Tower):
    """Breaks off between two blocks, in what ``where`` says."""

    where = ""

    def _run(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        for index in chosen:
            x = x + self.blocks[index](x)
            if self.where == "backward" and index == 1:
                x.register_hook(_fail)
            if self.where == "forward" and index == 2:
                raise ArithmeticError("breaks off")
            if self.where == "interrupt" and index == 2:
                raise KeyboardInterrupt
        return x


def _make() -> _Breaking:
    with seeded(1):
        return _Breaking()


def _train(ranks: SimulatedRanks, stage: int, where: str) -> list[float]:
    model = _make()
    engine = zero_core.build(model, Case(stage).config(), process_group=ranks)
    losses = []
    for step in range(3):
        x = rows(step, ranks.rank)
        model.where = where if step else ""
        if model.where == "interrupt":
            with pytest.raises(KeyboardInterrupt), torch.set_grad_enabled(step == 2):
                model(x)
        elif model.where:
            with pytest.raises(ArithmeticError, match="breaks off"):
                engine.backward(engine(x))
        if model.where == "backward":
            for take in (engine.step, lambda: engine.clip_grad_norm_(1.0)):
                with pytest.raises(RuntimeError, match="the last backward did not end"):
                    take()
        model.where = ""
        losses += train(engine, [x])
    assert engine.global_steps == 3
    return losses


@pytest.mark.parametrize("where", ["forward", "backward", "interrupt"])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 1), (3, 2), (1, 3), (2, 3), (3, 3)])
def test_training_goes_on_after_it_broke_off(world_size: int, stage: int, where: str) -> None:
    found = simulate(_train, world_size, stage, where)
    assert found == simulate(_train, world_size, stage, "")


@on_ranks(2)
def test_parameters_can_be_changed_and_an_engine_closed_after_ctrl_c(ranks: SimulatedRanks) -> None:
    model = _make()
    engine = zero_core.build(model, Case(stage=3).config(), process_group=ranks)
    model.where = "interrupt"
    with pytest.raises(KeyboardInterrupt):
        engine(torch.ones(2, 7))
    with engine.gathered(modifier_rank=0):
        model.blocks[0][0].weight.data.zero_()
    with pytest.raises(KeyboardInterrupt):
        engine(torch.ones(2, 7))
    engine.close()
    part = weakref.ref(engine.sharded_state.params[0])
    del engine, model
    gc.collect()
    assert part() is None, "a hook of the engine's is left on this thread"
