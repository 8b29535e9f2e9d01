"""Ranks whose branches leave out different parts of blocks follow DDP and do not wait for ever."""

from __future__ import annotations

import datetime
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zero_core
from zero_core.testing import SimulatedDDP, SimulatedRanks, seeded, simulate, spawn

WIDTH, DEPTH = 33, 10
# Per step: the blocks whose branch the last rank leaves out. A reduction that waited for the end of
# that rank's backward would keep its peers from gathering what it needs to get there.
LEFT_OUT: list[set[int]] = [set(), {9}, {8}, {5}, {0}, {7, 8, 9}, set(range(DEPTH))]
SKIPPED: list[set[int]] = [set(), {9}, {4}, {0}, {0, 1, 2}, {3, 4, 5, 6, 7, 8}, set(range(DEPTH))]
TWICE = 6  # called twice in a row


class Way(NamedTuple):
    is_recomputed: bool = False
    has_skipped: bool = False
    is_zeroed_late: bool = False


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


def _reference(ranks: SimulatedRanks, has_skipped: bool) -> dict[str, Tensor]:
    model = _model()
    ddp = SimulatedDDP(model, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(len(LEFT_OUT)):
        ddp(*_inputs(step, ranks.rank, ranks.size, has_skipped)).backward()
        ddp.average_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def _train(
    group: dist.ProcessGroup | SimulatedRanks,
    rank: int,
    world_size: int,
    stage: int,
    way: Way,
) -> dict[str, Tensor]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
    }
    if way.is_recomputed:
        config["activation_checkpointing"] = {}
    engine = zero_core.build(_model(), config, process_group=group)
    for step in range(len(LEFT_OUT)):
        inputs = _inputs(step, rank, world_size, way.has_skipped)
        engine(*inputs)  # a loss that nobody wants, with gradients on
        loss = engine(*inputs)
        if way.is_zeroed_late:
            engine.optimizer.zero_grad()
        engine.backward(loss)
        engine.step()
    values = engine.full_state_dict()
    engine.close()
    return values


def _follow(ranks: SimulatedRanks, stage: int, way: Way) -> None:
    expected = _reference(ranks, way.has_skipped)
    found = _train(ranks, ranks.rank, ranks.size, stage, way)
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_recomputed", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_leave_out_parts_of_blocks_follow_ddp(
    world_size: int, stage: int, is_recomputed: bool
) -> None:
    simulate(_follow, world_size, stage, Way(is_recomputed))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_skip_blocks_follow_ddp(world_size: int, stage: int) -> None:
    simulate(_follow, world_size, stage, Way(has_skipped=True))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_recomputed", [False, True], ids=["saved", "recomputed"])
@pytest.mark.parametrize("stage", range(4))
def test_ranks_follow_ddp_when_gradients_are_zeroed_between_forward_and_backward(
    stage: int, is_recomputed: bool
) -> None:
    simulate(_follow, 2, stage, Way(is_recomputed, is_zeroed_late=True))


def _follow_in_processes(rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=60))
    assert group is not None
    for has_skipped in (False, True):
        model = _model()
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for step in range(len(LEFT_OUT)):
            ddp(*_inputs(step, rank, world_size, has_skipped)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = _train(group, rank, world_size, 3, Way(has_skipped=has_skipped))
        for name, param in model.named_parameters():
            # With three ranks, DDP adds up in another order.
            atol = 0.0 if world_size == 2 else 1e-6
            torch.testing.assert_close(found[name], param.detach(), rtol=0.0, atol=atol)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_that_leave_out_or_skip_blocks_do_not_wait_for_ever(world_size: int) -> None:
    spawn(_follow_in_processes, world_size)


def _hold_back(ranks: SimulatedRanks) -> None:
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
        engine = zero_core.build(
            _model(),
            {
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": stage},
                "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            },
            process_group=ranks,
        )
        with engine.no_sync():
            engine.backward(engine(inputs[0], set(), skipped[0]))
            engine.step()
        engine.backward(engine(inputs[1], set(), skipped[1]))
        found = engine.states.get_full("blocks.4.always.weight", "grad")
        torch.testing.assert_close(found, expected, rtol=0.1, atol=0.05 * float(expected.max()))
        engine.close()


def test_a_unit_that_one_rank_left_out_within_no_sync_is_reduced_as_it_was_held() -> None:
    simulate(_hold_back, 2)
