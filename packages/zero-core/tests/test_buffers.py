"""Module buffers, which are broadcast from rank 0 at the same moments as in DDP."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zero_core
from zero_core.testing.models import make_tower, rows, seeded
from zero_core.testing.oracle import Case
from zero_core.testing.ranks import on_processes
from zero_core.testing.simulated import on_ranks
from zero_core.testing.training import adamw, assert_same, train


class _Normed(nn.Module):
    def __init__(self):
        super().__init__()
        with seeded(7):
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh())
                for _ in range(2)
            )
            self.register_buffer("mean", torch.zeros(6), persistent=False)
            self.blocks[0].register_buffer("again", self.mean)
            self.register_buffer("nothing", None)

    def forward(self, x):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        x = x - self.mean
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _x(step, micro, rank):
    return rows(3 * step + micro, rank, 6)


def _buffers(model):
    return {name: b.clone() for name, b in model.named_buffers(remove_duplicate=False)}


def _train(case, rank, *, is_ddp):
    model = _Normed()
    call = DistributedDataParallel(model) if is_ddp else case.build(model=model)
    optimizer = adamw(model)
    losses = []
    for step in range(4):
        for micro in range(case.accumulation):
            with call.no_sync() if micro < case.accumulation - 1 else nullcontext():
                loss = call(_x(step, micro, rank))
                if is_ddp:
                    (loss / case.accumulation).backward()
                else:
                    call.backward(loss)
                    call.step()
            losses.append(loss.item())
        if is_ddp:
            optimizer.step()
            optimizer.zero_grad()
        if step % 2:
            model.eval()
            with torch.no_grad():
                losses.append(call(_x(99, 0, rank)).item())
            model.train()
    return losses, _buffers(model)


@on_processes(2)
def test_batch_norm_follows_ddp_in_training_evaluation_and_no_sync(ranks):
    for accumulation in (1, 3):
        expected = _train(Case(accumulation=accumulation), ranks.rank, is_ddp=True)
        for stage in (1, 3):
            found = _train(Case(stage, accumulation=accumulation), ranks.rank, is_ddp=False)
            assert_same(found, expected)


@on_ranks(2)
def test_without_broadcast_buffers_each_rank_keeps_its_own(ranks):
    engine = zero_core.build(
        _Normed(), {**Case().config(), "broadcast_buffers": False}, process_group=ranks
    )
    alone = _Normed()
    for step in range(2):
        engine(_x(step, 0, ranks.rank))
        alone(_x(step, 0, ranks.rank))
    assert_same(_buffers(engine.module), _buffers(alone))


@on_ranks(2)
def test_two_forwards_may_precede_one_backward(ranks):
    engine = Case(stage=3).build(ranks, _Normed())
    for step in range(2):
        engine.backward(engine(_x(step, 0, ranks.rank)) + engine(_x(step, 1, ranks.rank)))
        engine.step()
    assert engine.skipped_steps == 0


CHANGES = {
    "gains the first of a part": {"seen": [0.0] * 3, "first.more": [0.0] * 2},
    "loses": {},
    "reshapes": {"seen": [0.0] * 5},
    "renames": {"other": [0.0] * 3},
}


@pytest.mark.parametrize(
    ("odd", "change", "dtype"),
    [
        (1, "gains the first of a part", "bf16"),
        (0, "loses", "bf16"),
        (1, "reshapes", "fp32"),
        (2, "renames", "fp32"),
    ],
)
@on_ranks(3)
def test_a_rank_that_changes_its_buffers_alone_is_named_in_the_step(ranks, odd, change, dtype):
    rank, model = ranks.rank, make_tower(1)
    model.register_buffer("seen", torch.full((3,), 7.0))
    engine = Case(1, dtype).build(ranks, model)

    def step():
        train(engine, [torch.ones(1, 7)])

    def alter():
        if change == "gains the first of a part":
            model.first.register_buffer("more", torch.full((2,), float(rank)))
        elif change == "loses":
            del model.seen
        elif change == "renames":
            model.register_buffer("other", model._buffers.pop("seen"))
        else:
            model.seen = torch.full((5,), float(rank))

    model.seen.fill_(rank)
    step()
    assert model.seen.tolist() == [0.0] * 3
    if rank == odd:
        alter()
    with pytest.raises(zero_core.RankMismatchError, match=r"buffer (first.more|more|seen|other)"):
        step()
    engine.backward(engine(torch.ones(1, 7)))  # still broadcasts the earlier list of buffers
    if rank != odd:
        alter()
    engine.step()  # all ranks have the same buffers again
    step()
    assert {name: b.tolist() for name, b in model.named_buffers()} == CHANGES[change]
