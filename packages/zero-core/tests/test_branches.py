"""Ranks whose branches leave out different parts of blocks follow DDP and do not wait for ever."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zero_core
from zero_core.testing import (
    LR,
    WEIGHT_DECAY,
    Case,
    SimulatedRanks,
    check_like_ddp,
    on_ranks,
    seeded,
    spawn,
    train,
    train_ddp,
)

WIDTH, DEPTH = 33, 10
# Per step: the blocks whose branch the last rank leaves out. A reduction that waited for the end of
# that rank's backward would keep its peers from gathering what it needs to get there.
LEFT_OUT: list[set[int]] = [set(), {9}, {8}, {5}, {0}, {7, 8, 9}, set(range(DEPTH))]
SKIPPED: list[set[int]] = [set(), {9}, {4}, {0}, {0, 1, 2}, {3, 4, 5, 6, 7, 8}, set(range(DEPTH))]
TWICE = 6  # called twice in a row


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.branch = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, has_branch: bool | None) -> Tensor:
        if has_branch is None:
            return x  # stochastic depth: backward has nothing to do here
        x = x + torch.tanh(self.always(x))
        return x + self.branch(x) if has_branch else x


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 3)
        self.start = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, left_out: set[int], skipped: set[int]) -> Tensor:
        x = x + self.start
        for index, block in enumerate(self.blocks):
            x = block(x, None if index in skipped else index not in left_out)
            if index == TWICE:
                x = block(x, index not in left_out)
        out: Tensor = self.head(x).square().mean()
        return out


def _model() -> _Net:
    with seeded(0):
        return _Net()


def _inputs(
    step: int, rank: int, world_size: int, has_skipped: bool
) -> tuple[Tensor, set[int], set[int]]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(4, WIDTH, generator=generator)
    if rank < world_size - 1:
        return x, set(), set()
    return (x, set(), SKIPPED[step]) if has_skipped else (x, LEFT_OUT[step], set())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("has_skipped", "is_recomputed"),
    [(False, False), (False, True), (True, False)],
    ids=["parts", "parts, recomputed", "blocks"],
)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_ranks_that_leave_out_blocks_or_parts_of_them_follow_ddp(
    ranks: SimulatedRanks, stage: int, has_skipped: bool, is_recomputed: bool
) -> None:
    def draw(step: int, rank: int) -> Any:
        return _inputs(step, rank, ranks.size, has_skipped)

    case = Case(stage, top={"activation_checkpointing": {} if is_recomputed else None})
    check_like_ddp(ranks, _model, draw, case, steps=len(LEFT_OUT))


@pytest.mark.parametrize(("stage", "is_recomputed"), [(0, True), (1, False), (2, True), (3, False)])
@on_ranks(2)
def test_ranks_follow_ddp_when_gradients_are_zeroed_between_forward_and_backward(
    ranks: SimulatedRanks, stage: int, is_recomputed: bool
) -> None:
    """Losses that nobody wants, with gradients on, and gradients zeroed before each backward."""
    batches = [_inputs(step, ranks.rank, ranks.size, False) for step in range(len(LEFT_OUT))]
    model = _model()
    train_ddp(model, ranks, batches)
    case = Case(stage, top={"activation_checkpointing": {} if is_recomputed else None})
    engine = zero_core.build(_model(), case.config(), process_group=ranks)
    for inputs in batches:
        engine(*inputs)
        loss = engine(*inputs)
        engine.optimizer.zero_grad()
        engine.backward(loss)
        engine.step()
    found = engine.full_state_dict()
    torch.testing.assert_close(found, dict(model.state_dict()), rtol=0.0, atol=0.0)


def _follow_in_processes(rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=60))
    for has_skipped in (False, True):
        batches = [_inputs(step, rank, world_size, has_skipped) for step in range(len(LEFT_OUT))]
        model = _model()
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True
        )
        for inputs in batches:
            ddp(*inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
        engine = zero_core.build(_model(), Case(3).config(), process_group=group)
        train(engine, batches)
        # With three ranks, DDP adds up in another order.
        atol = 0.0 if world_size == 2 else 1e-6
        found = engine.full_state_dict()
        torch.testing.assert_close(found, dict(model.state_dict()), rtol=0.0, atol=atol)
        engine.close()


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_that_leave_out_or_skip_blocks_do_not_wait_for_ever(world_size: int) -> None:
    spawn(_follow_in_processes, world_size)


@on_ranks(2)
def test_a_unit_that_one_rank_left_out_within_no_sync_is_reduced_as_it_was_held(
    ranks: SimulatedRanks,
) -> None:
    """A micro-step within no_sync in which the last rank uses nothing of a unit, in bf16."""
    inputs = [_inputs(micro, ranks.rank, ranks.size, False)[0] for micro in range(2)]
    skipped: list[set[int]] = [{4}, set()] if ranks.rank == ranks.size - 1 else [set(), set()]
    reference = _model()
    for x, without in zip(inputs, skipped, strict=True):
        (reference(x, set(), without) / 2).backward()
    expected = reference.get_parameter("blocks.4.always.weight").grad
    assert expected is not None
    ranks.connect().sum(expected.div_(ranks.size))
    for stage in range(4):
        sgd = {"type": "SGD", "params": {"lr": 1.0}}
        case = Case(stage, "bf16", accumulation=2, top={"optimizer": sgd})
        engine = zero_core.build(_model(), case.config(), process_group=ranks)
        with engine.no_sync():
            engine.backward(engine(inputs[0], set(), skipped[0]))
            engine.step()
        engine.backward(engine(inputs[1], set(), skipped[1]))
        found = engine.states.get_full("blocks.4.always.weight", "grad")
        torch.testing.assert_close(found, expected, rtol=0.1, atol=0.05 * float(expected.max()))
        engine.close()
