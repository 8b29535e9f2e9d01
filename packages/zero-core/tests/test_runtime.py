"""Runtime of a step: gather, release, exceptions, recomputation and evaluation."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zero_core
from zero_core.testing import Case, batch, make_model, spawn

STAGES = (0, 1, 2, 3)


class _Tower(nn.Module):
    """Linear blocks, each optionally recomputed in backward, several to a checkpoint."""

    def __init__(self, recompute: str = "none") -> None:
        super().__init__()
        torch.manual_seed(1)
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


def _reference(rank: int, recompute: str, steps: int, backwards: int = 1) -> dict[str, Tensor]:
    model = _Tower(recompute)
    ddp = DistributedDataParallel(model)
    optimizer = _adamw(model)
    for step in range(steps):
        for i in range(backwards):
            ddp(_data(step + 50 * i, rank).requires_grad_()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {k: v.detach().clone() for k, v in model.state_dict().items()}


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def _recompute(rank: int, world_size: int) -> None:
    for mode in ("none", "reentrant", "plain", "pairs"):
        expected = _reference(rank, mode, 3)
        for stage in STAGES:
            engine = zero_core.build(_Tower(mode), Case(stage=stage).config() | _OPT)
            for step in range(3):
                engine.backward(engine(_data(step, rank).requires_grad_()))
                engine.step()
            assert _equal(engine.full_state_dict(), expected), (mode, stage)


_OPT: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}
}


def test_activation_checkpointing_matches_ddp_at_every_stage():
    spawn(_recompute, 2)


def _two_forwards(rank: int, world_size: int) -> None:
    for stage in STAGES:
        reference, model = _Tower(), _Tower()
        ddp = DistributedDataParallel(reference)
        optimizer = _adamw(reference)
        engine = zero_core.build(model, Case(stage=stage).config() | _OPT)
        for step in range(3):
            x, y = _data(step, rank), _data(step + 9, rank)
            (ddp(x) + ddp(y)).backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.backward(engine(x) + engine(y))
            engine.step()
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(engine.full_state_dict()[name], value)


def test_two_forwards_before_one_backward_match_ddp():
    spawn(_two_forwards, 2)


def _two_backwards(rank: int, world_size: int) -> None:
    # DDP adds the second backward to the reduced gradient of the first: the sums are the same up
    # to rounding.
    expected = _reference(rank, "none", 3, backwards=2)
    for stage in STAGES:
        engine = zero_core.build(_Tower(), Case(stage=stage).config() | _OPT)
        for step in range(3):
            for i in range(2):
                engine.backward(engine(_data(step + 50 * i, rank)))
            engine.step()
        for name, value in engine.full_state_dict().items():
            torch.testing.assert_close(value, expected[name])


def test_two_backwards_before_one_step_add_up():
    spawn(_two_backwards, 2)


def _plain_backward(rank: int, world_size: int) -> None:
    expected = _reference(rank, "none", 3)
    for stage in STAGES:
        engine = zero_core.build(_Tower(), Case(stage=stage).config() | _OPT)
        for step in range(3):
            engine(_data(step, rank)).backward()
            engine.step()
        assert _equal(engine.full_state_dict(), expected)


def test_a_plain_backward_works_too():
    spawn(_plain_backward, 2)


def _sharded_is_loud(rank: int, world_size: int) -> None:
    engine = zero_core.build(_Tower(), Case(stage=3).config() | _OPT)
    weight = engine.module.blocks[0][0].weight
    assert weight.shape == (7, 6)
    assert weight.isnan().all()
    with pytest.raises(RuntimeError):
        weight.data.add_(1.0)
    with engine.gathered() as module:
        assert not module.blocks[0][0].weight.isnan().any()
        expected = _Tower().blocks[0][0].weight
        assert torch.equal(module.blocks[0][0].weight, expected)
    assert weight.isnan().all()


def test_reading_a_sharded_parameter_is_loud_and_gathered_brings_it_back():
    spawn(_sharded_is_loud, 2)


def _evaluation(rank: int, world_size: int) -> None:
    expected = _reference(rank, "none", 2)
    for stage in STAGES:
        engine = zero_core.build(_Tower(), Case(stage=stage).config() | _OPT)
        plain = _Tower().eval()
        for step in range(2):
            engine.eval()
            with torch.no_grad():
                value = engine(_data(99, 0)).item()
            if step == 0:
                assert value == plain(_data(99, 0)).item()
            engine.train()
            engine.backward(engine(_data(step, rank)))
            engine.step()
        assert _equal(engine.full_state_dict(), expected)


def test_evaluation_between_steps_changes_nothing():
    spawn(_evaluation, 2)


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


def _exceptions(rank: int, world_size: int) -> None:
    expected = _reference(rank, "none", 2)
    for stage in STAGES:
        engine = zero_core.build(_Failing(), Case(stage=stage).config() | _OPT)
        for step in range(2):
            for where in ("forward", "backward"):
                engine.module.fails_in = where
                with pytest.raises(ArithmeticError):
                    engine.backward(engine(_data(7, rank)))
            engine.module.fails_in = ""
            engine.backward(engine(_data(step, rank)))
            engine.step()
        found = {k.removeprefix("tower."): v for k, v in engine.full_state_dict().items()}
        assert _equal(found, expected), stage


def test_after_an_exception_the_next_step_still_works():
    spawn(_exceptions, 2)


def test_a_rank_whose_loss_does_not_use_the_model_takes_part():
    spawn(_idle_below_three, 2)


def _idle_below_three(rank: int, world_size: int) -> None:
    results = []
    for stage in (0, 1, 2):
        engine = zero_core.build(_Tower(), Case(stage=stage).config() | _OPT)
        loss = engine(_data(0, rank))
        engine.backward(loss if rank == 0 else torch.zeros((), requires_grad=True))
        engine.step()
        results.append(engine.full_state_dict())
    assert _equal(results[0], results[1])
    assert _equal(results[0], results[2])
    assert not torch.equal(results[0]["out.weight"], _Tower().out.weight)


def _different_models(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    width = 3 + rank
    with pytest.raises(zero_core.RankMismatchError, match="different model"):
        zero_core.build(nn.Linear(width, 2), Case().config())
    clip = Case(clipping=float(rank + 1)).config()
    with pytest.raises(zero_core.RankMismatchError, match="different configuration"):
        zero_core.build(nn.Linear(3, 2), clip)


def test_ranks_with_different_models_or_configurations_are_refused():
    spawn(_different_models, 2)


def _starts_from_rank_zero(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[1].running_mean.fill_(rank)
    engine = zero_core.build(model, Case(stage=3).config())
    torch.manual_seed(0)
    assert torch.equal(engine.full_state_dict()["0.weight"], nn.Linear(3, 2).weight)
    assert (engine.module[1].running_mean == 0).all()


def test_every_rank_starts_from_rank_zeros_values():
    spawn(_starts_from_rank_zero, 2)


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


def _drop(rank: int, world_size: int) -> None:
    engine = zero_core.build(_Tower(), Case(stage=3).config() | _OPT)
    seen: list[weakref.ref[Tensor]] = []
    for module in engine.module.modules():
        module.register_forward_hook(lambda m, a, out: seen.append(weakref.ref(out)))
    loss = engine(_data(0, rank))
    assert seen[-1]() is loss
    del loss
    assert [ref() for ref in seen if ref() is not None] == []


def test_a_loss_that_is_dropped_frees_its_activations() -> None:
    spawn(_drop, 2)
