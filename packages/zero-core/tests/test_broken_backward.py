"""A backward that raises leaves a partial gradient, and Ctrl-C a forward without its end."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import zero_core
from zero_core.testing import Case, SimulatedRanks, simulate


class _Tower(nn.Module):
    """Four blocks. While ``is_broken``, backward raises between the second and the third."""

    is_broken = False
    is_interrupted = False

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if index == 2 and self.is_interrupted:
                raise KeyboardInterrupt
            if index == 1 and self.is_broken:
                x.register_hook(self._raise)
        return x.square().mean()

    def _raise(self, grad: Tensor) -> None:
        raise ArithmeticError("the backward breaks off")


def _train(ranks: SimulatedRanks, case: Case, breaks: bool) -> list[float]:
    model = _Tower()
    engine = zero_core.build(model, case.config(), process_group=ranks)
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + ranks.rank)
        data = torch.randn(5, 6, generator=generator)
        if breaks and step == 1:
            model.is_broken = True
            with pytest.raises(ArithmeticError, match="breaks off"):
                engine.backward(engine(data))
            for take in (engine.step, lambda: engine.clip_grad_norm_(1.0)):
                with pytest.raises(RuntimeError, match="the last backward did not end"):
                    take()
            model.is_broken = False
        loss = engine(data)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert engine.global_steps == 3
    return losses


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_step_refuses_the_gradient_when_backward_raised(stage: int, world_size: int) -> None:
    case = Case(stage=stage)
    assert simulate(_train, world_size, case, True) == simulate(_train, world_size, case, False)


def _train_after_interrupts(ranks: SimulatedRanks, case: Case, is_interrupted: bool) -> list[float]:
    model = _Tower()
    engine = zero_core.build(model, case.config(), process_group=ranks)
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + ranks.rank)
        data = torch.randn(5, 6, generator=generator)
        if is_interrupted and step:
            model.is_interrupted = True
            with pytest.raises(KeyboardInterrupt), torch.set_grad_enabled(step == 2):
                engine.module(data)
            model.is_interrupted = False
        loss = engine(data)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("stage", [1, 3])
def test_training_goes_on_after_ctrl_c_in_a_forward(stage: int, world_size: int) -> None:
    case = Case(stage=stage)
    found = simulate(_train_after_interrupts, world_size, case, True)
    assert found == simulate(_train_after_interrupts, world_size, case, False)


def _gather_after_interrupt(ranks: SimulatedRanks) -> None:
    model = _Tower()
    engine = zero_core.build(model, Case(stage=3).config(), process_group=ranks)
    model.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        engine(torch.ones(2, 6))
    with engine.gathered(modifier_rank=0):
        model.blocks[0].weight.data.zero_()
    with pytest.raises(KeyboardInterrupt):
        engine(torch.ones(2, 6))
    engine.close()
    part = weakref.ref(engine.sharded_state.params[0])
    del engine, model
    gc.collect()
    assert part() is None, "a hook of the engine's is left on this thread"


def test_parameters_can_be_changed_and_an_engine_closed_after_ctrl_c() -> None:
    simulate(_gather_after_interrupt, 2)
