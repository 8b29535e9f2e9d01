"""Ranks of which one needs no gradient of any block, or of which one fails in its forward."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from zero_core.comm.communicator import Communicator
from zero_core.comm.device import make_transport
from zero_core.comm.meter import Meter
from zero_core.protocols import Work
from zero_core.step.statistics import GradientStatistics
from zero_core.testing import SimulatedDDP, SimulatedRanks, seeded, simulate, spawn

WIDTH = 6
ADAMW = {"lr": 1e-2, "weight_decay": 0.01}


class _Failing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ArithmeticError("a batch of NaN")
        return torch.tanh(super().forward(x))


class _Net(nn.Module):
    """Frozen blocks between a trainable first layer and a trainable head, both in the root."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(5):
            self.first = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList(_Failing(WIDTH, WIDTH) for _ in range(4))
            self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, is_detached: bool = False, has_no_grad: bool = False) -> Tensor:
        x = self.first(x)
        if is_detached:
            x = x.detach()
        with torch.set_grad_enabled(not has_no_grad):
            for block in self.blocks:
                x = block(x)
        loss: Tensor = self.head(x).square().mean()
        return loss


def _make(is_frozen: bool) -> _Net:
    net = _Net()
    net.blocks.requires_grad_(not is_frozen)
    return net


# By step: whether the blocks need no gradient on the last rank, and on the others.
WITHOUT = [(True, False), (False, False), (True, False), (True, True), (True, True), (False, False)]


def _inputs(step: int, ranks: SimulatedRanks, is_frozen: bool) -> tuple[Tensor, bool, bool]:
    generator = torch.Generator().manual_seed(10 * step + ranks.rank)
    x = torch.randn(3, WIDTH, generator=generator)
    is_without = WITHOUT[step][ranks.rank < ranks.size - 1]
    return x, is_without and is_frozen, is_without and not is_frozen


def _follow(ranks: SimulatedRanks, stage: int, is_frozen: bool) -> None:
    model = _make(is_frozen)
    ddp = SimulatedDDP(model, ranks)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True, **ADAMW)
    for step in range(len(WITHOUT)):
        ddp(*_inputs(step, ranks, is_frozen)).backward()
        ddp.average_gradients()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: value.detach() for name, value in model.state_dict().items()}

    engine = zero_core.build(_make(is_frozen), _config(stage), process_group=ranks)
    for step in range(len(WITHOUT)):
        engine.backward(engine(*_inputs(step, ranks, is_frozen)))
        engine.step()
    torch.testing.assert_close(engine.full_state_dict(), expected, rtol=0.0, atol=0.0)


def _config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": ADAMW},
    }


@pytest.mark.parametrize("is_frozen", [True, False], ids=["frozen blocks", "no_grad"])
@pytest.mark.parametrize(("world_size", "stage"), [(2, 0), (3, 1), (3, 2), (2, 3), (3, 3)])
def test_one_rank_may_need_no_gradient_of_any_block(
    world_size: int, stage: int, is_frozen: bool
) -> None:
    simulate(_follow, world_size, stage, is_frozen)


class _Counting:
    def __init__(self, native: Any, gathers: list[int]) -> None:
        self._native = native
        self._gathers = gathers

    def all_gather(self, out: Tensor, shard: Tensor, *, unit: int, **kwargs: Any) -> Work:
        if kwargs["backward"]:
            self._gathers.append(unit)
        work: Work = self._native.all_gather(out, shard, unit=unit, **kwargs)
        return work

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        work: Work = self._native.reduce_scatter(out, full, unit=unit)
        return work


def _count(ranks: SimulatedRanks) -> list[list[int]]:
    gathers: list[int] = []

    def counting(native: Any, **settings: Any) -> Any:
        return _Counting(native, gathers)

    engine = zero_core.build(_make(True), _config(3), process_group=ranks, collectives=counting)
    found = []
    for step in range(3):
        gathers.clear()
        engine.backward(engine(_inputs(step, ranks, False)[0], is_detached=True))
        engine.step()
        found.append(list(gathers))
    return found


def test_blocks_that_no_rank_needs_in_backward_are_not_gathered_from_the_second_step_on() -> None:
    first, *later = simulate(_count, 2)[0]
    assert len(first) == 3  # the last block is still there
    assert later == [[], []]


def _fail(rank: int, world_size: int) -> None:
    engine = zero_core.build(_Net(), _config(3))
    x = torch.full((3, WIDTH), float("nan")) if rank == 1 else torch.ones(3, WIDTH)
    if rank == 1:
        with pytest.raises(ArithmeticError):
            engine(x)
    else:
        expected = r"rank 1: the forward of unit 1 \(blocks.0\) raised ArithmeticError: a batch of"
        with pytest.raises(zero_core.CollectiveError, match=expected):
            engine.backward(engine(x))
    os._exit(0)  # as a rank ends that has failed: without the others


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_raises_in_forward_ends_the_others_with_its_name(world_size: int) -> None:
    spawn(_fail, world_size)


def _go_on(rank: int, world_size: int) -> None:
    engine = zero_core.build(_Net(), _config(3))
    with pytest.raises(ArithmeticError):
        engine(torch.full((3, WIDTH), float("nan")))  # on every rank
    engine.backward(engine(torch.ones(3, WIDTH)))
    engine.step()
    if rank == 0:
        with pytest.raises(zero_core.CollectiveError, match="failed or timed out"):
            engine.backward(engine(torch.ones(3, WIDTH)))
    os._exit(0)


def test_a_failure_that_all_ranks_got_over_is_not_named_later() -> None:
    spawn(_go_on, 2)


class _Keeping(nn.Module):
    """A block that returns None."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, kept: list[Tensor]) -> None:
        kept.append(self.inner(kept[-1]))


class _OfKeeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Keeping() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        kept = [x]
        for block in self.blocks:
            block(kept)
        return kept[-1].mean()


def _retry(rank: int, world_size: int) -> None:
    engine = zero_core.build(_OfKeeping(), _config(3))
    try:
        raise MemoryError("the batch before")
    except MemoryError:
        loss = engine(torch.ones(3, WIDTH))
    if rank == 0:
        with pytest.raises(zero_core.CollectiveError) as caught:
            engine.backward(loss)
        assert "MemoryError" not in str(caught.value)
    os._exit(0)


def test_a_forward_in_the_handler_of_an_error_is_not_said_to_have_raised_it() -> None:
    spawn(_retry, 2)


def _all_know_it(ranks: SimulatedRanks) -> None:
    # Sets of which the CRC-32 of the middle one is the mean of the others'.
    differ: list[set[int]] = [{~28, ~18}, {~25, ~12}, {~22, ~14}]
    control, meter = ranks.connect(), Meter()
    communicator = Communicator(make_transport(ranks, 1, None, meter), control, {})
    statistics = GradientStatistics(communicator, ranks.device, 1, 30, meter)
    for sets, is_agreed in ((differ, False), ([{1, ~2}] * 3, True), ([{1}, {2}, {1}], False)):
        statistics.agree(
            torch.zeros(1, dtype=torch.float64),
            {0},
            has_unreduced=False,
            is_tail_late=False,
            left_out=frozenset(sets[ranks.rank]),
        )
        assert statistics.is_left_out_agreed is is_agreed
        assert statistics.num_ranks_with_grad == [3.0]


def test_all_ranks_know_of_one_that_left_out_other_units() -> None:
    simulate(_all_know_it, 3)
