"""Runtime of a step: gather, release, exceptions, recomputation and evaluation."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_core
from zero_core.core import access
from zero_core.testing import (
    Case,
    SimulatedDDP,
    SimulatedRanks,
    batch,
    make_model,
    seeded,
    simulate,
    spawn,
)

STAGES = (0, 1, 2, 3)


class _Tower(nn.Module):
    """Linear blocks, each optionally recomputed in backward, several to a checkpoint."""

    def __init__(self, recompute: str = "none") -> None:
        super().__init__()
        with seeded(1):
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(4)
            )
            self.out = nn.Linear(6, 1)
            self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute == "pairs":
            for i in (0, 2):
                x = checkpoint(self._pair, x, i, use_reentrant=False)
        else:
            for block in self.blocks:
                if self.recompute == "none":
                    x = x + block(x)
                else:
                    x = x + checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return self.out(x).square().mean()

    def _pair(self, x: Tensor, i: int) -> Tensor:
        x = x + self.blocks[i](x)
        return x + self.blocks[i + 1](x)


def _data(step: int, rank: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def _reference(
    ranks: SimulatedRanks, recompute: str, steps: int, backwards: int = 1
) -> dict[str, Tensor]:
    model = _Tower(recompute)
    ddp = SimulatedDDP(model, ranks)
    optimizer = _adamw(model)
    for step in range(steps):
        for i in range(backwards):
            ddp(_data(step + 50 * i, ranks.rank).requires_grad_()).backward()
            ddp.average_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def _recompute(ranks: SimulatedRanks) -> None:
    for mode in ("none", "reentrant", "plain", "pairs"):
        expected = _reference(ranks, mode, 3)
        for stage in STAGES:
            engine = zero_core.build(
                _Tower(mode), Case(stage=stage).config() | _OPT, process_group=ranks
            )
            for step in range(3):
                engine.backward(engine(_data(step, ranks.rank).requires_grad_()))
                engine.step()
            assert _equal(engine.full_state_dict(), expected), (mode, stage)


_OPT: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}
}


def test_activation_checkpointing_matches_ddp_at_every_stage():
    simulate(_recompute, 2)


def _two_forwards(ranks: SimulatedRanks, stage: int) -> None:
    reference, model = _Tower(), _Tower()
    ddp = SimulatedDDP(reference, ranks)
    optimizer = _adamw(reference)
    engine = zero_core.build(model, Case(stage=stage).config() | _OPT, process_group=ranks)
    for step in range(3):
        x, y = _data(step, ranks.rank), _data(step + 9, ranks.rank)
        (ddp(x) + ddp(y)).backward()
        ddp.average_gradients()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(engine(x) + engine(y))
        engine.step()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(engine.full_state_dict()[name], value)


@pytest.mark.parametrize("stage", range(4))
def test_two_forwards_before_one_backward_match_ddp(stage):
    simulate(_two_forwards, 2, stage)


def _two_backwards(ranks: SimulatedRanks, stage: int) -> None:
    # DDP adds the second backward to the reduced gradient of the first: the sums are the same up
    # to rounding.
    expected = _reference(ranks, "none", 3, backwards=2)
    engine = zero_core.build(_Tower(), Case(stage=stage).config() | _OPT, process_group=ranks)
    for step in range(3):
        for i in range(2):
            engine.backward(engine(_data(step + 50 * i, ranks.rank)))
        engine.step()
    for name, value in engine.full_state_dict().items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.parametrize("stage", range(4))
def test_two_backwards_before_one_step_add_up(stage):
    simulate(_two_backwards, 2, stage)


def _plain_backward(ranks: SimulatedRanks, stage: int) -> None:
    expected = _reference(ranks, "none", 3)
    engine = zero_core.build(_Tower(), Case(stage=stage).config() | _OPT, process_group=ranks)
    for step in range(3):
        engine(_data(step, ranks.rank)).backward()
        engine.step()
    assert _equal(engine.full_state_dict(), expected)


@pytest.mark.parametrize("stage", range(4))
def test_a_plain_backward_works_too(stage):
    simulate(_plain_backward, 2, stage)


def _sharded_is_loud(ranks: SimulatedRanks) -> None:
    engine = zero_core.build(_Tower(), Case(stage=3).config() | _OPT, process_group=ranks)
    weight = engine.module.blocks[0][0].weight
    assert weight.shape == (7, 6)
    with pytest.raises(RuntimeError, match=r"0\.0\.weight was read where stage 3 holds only"):
        weight.data.add_(1.0)
    with pytest.raises(RuntimeError, match="was written where stage 3 holds only"):
        weight.clamp_(max=1.0)
    with engine.gathered() as module:
        expected = _Tower().blocks[0][0].weight
        assert torch.equal(module.blocks[0][0].weight, expected)
    assert access.is_refused(weight)


def test_reading_a_sharded_parameter_is_loud_and_gathered_brings_it_back():
    simulate(_sharded_is_loud, 2)


def _evaluation(ranks: SimulatedRanks, stage: int) -> None:
    expected = _reference(ranks, "none", 2)
    engine = zero_core.build(_Tower(), Case(stage=stage).config() | _OPT, process_group=ranks)
    plain = _Tower().eval()
    for step in range(2):
        engine.eval()
        with torch.no_grad():
            value = engine(_data(99, 0)).item()
        if step == 0:
            assert value == plain(_data(99, 0)).item()
        engine.train()
        engine.backward(engine(_data(step, ranks.rank)))
        engine.step()
    assert _equal(engine.full_state_dict(), expected)


@pytest.mark.parametrize("stage", range(4))
def test_evaluation_between_steps_changes_nothing(stage):
    simulate(_evaluation, 2, stage)


class _Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = _Tower()
        self.fails_in = ""

    def forward(self, x: Tensor) -> Tensor:
        y = self.tower(x)
        if self.fails_in == "forward":
            raise ArithmeticError("as asked")
        if self.fails_in == "backward":
            y = _Raise.apply(y)
        return y


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("as asked")


def _exceptions(ranks: SimulatedRanks, stage: int) -> None:
    expected = _reference(ranks, "none", 2)
    engine = zero_core.build(_Failing(), Case(stage=stage).config() | _OPT, process_group=ranks)
    for step in range(2):
        for where in ("forward", "backward"):
            engine.module.fails_in = where
            with pytest.raises(ArithmeticError):
                engine.backward(engine(_data(7, ranks.rank)))
        engine.module.fails_in = ""
        engine.backward(engine(_data(step, ranks.rank)))
        engine.step()
    found = {k.removeprefix("tower."): v for k, v in engine.full_state_dict().items()}
    assert _equal(found, expected), stage


@pytest.mark.parametrize("stage", range(4))
def test_after_an_exception_the_next_step_still_works(stage):
    simulate(_exceptions, 2, stage)


def test_a_rank_whose_loss_does_not_use_the_model_takes_part():
    simulate(_idle_below_three, 2)


def _idle_below_three(ranks: SimulatedRanks) -> None:
    results = []
    for stage in (0, 1, 2):
        engine = zero_core.build(_Tower(), Case(stage=stage).config() | _OPT, process_group=ranks)
        loss = engine(_data(0, ranks.rank))
        engine.backward(loss if ranks.rank == 0 else torch.zeros((), requires_grad=True))
        engine.step()
        results.append(engine.full_state_dict())
    assert _equal(results[0], results[1])
    assert _equal(results[0], results[2])
    assert not torch.equal(results[0]["out.weight"], _Tower().out.weight)


def _different_models(ranks: SimulatedRanks) -> None:
    width = 3 + ranks.rank
    with pytest.raises(zero_core.RankMismatchError, match="different model"):
        zero_core.build(nn.Linear(width, 2), Case().config(), process_group=ranks)
    clip = Case(clipping=float(ranks.rank + 1)).config()
    with pytest.raises(zero_core.RankMismatchError, match="different configuration"):
        zero_core.build(nn.Linear(3, 2), clip, process_group=ranks)


def test_ranks_with_different_models_or_configurations_are_refused():
    simulate(_different_models, 2)


def _starts_from_rank_zero(ranks: SimulatedRanks) -> None:
    with seeded(ranks.rank):
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[1].running_mean.fill_(ranks.rank)
    engine = zero_core.build(model, Case(stage=3).config(), process_group=ranks)
    with seeded(0):
        expected = nn.Linear(3, 2).weight
    assert torch.equal(engine.full_state_dict()["0.weight"], expected)
    assert (engine.module[1].running_mean == 0).all()


def test_every_rank_starts_from_rank_zeros_values():
    simulate(_starts_from_rank_zero, 2)


def _lost_peer(rank: int, world_size: int) -> None:
    engine = zero_core.build(make_model(), Case(stage=3).config())
    if rank == 1:
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo", store=dist.HashStore(), rank=0, world_size=1
        )  # for the caller to destroy
        return
    with pytest.raises(zero_core.CollectiveError, match=r"rank 0: all_gather of unit 0 \(root\)"):
        engine(**batch(0, 0, rank))


def test_a_lost_peer_is_named_by_rank_unit_and_collective():
    spawn(_lost_peer, 2)


def _drop(ranks: SimulatedRanks) -> None:
    engine = zero_core.build(_Tower(), Case(stage=3).config() | _OPT, process_group=ranks)
    seen: list[weakref.ref[Tensor]] = []
    for module in engine.module.modules():
        module.register_forward_hook(lambda m, a, out: seen.append(weakref.ref(out)))
    loss = engine(_data(0, ranks.rank))
    assert seen[-1]() is loss
    del loss
    assert [ref() for ref in seen if ref() is not None] == []


def test_a_loss_that_is_dropped_frees_its_activations() -> None:
    simulate(_drop, 2)
