"""The order in which ranks launch collectives: equal per communicator, and where it is for all."""

import dataclasses

import pytest
import torch
from support.launches import LoggedCollectives
from torch import nn

from zero_core.comm.device import make_transport
from zero_core.comm.meter import Meter
from zero_core.testing import Case, batch, make_model, make_tower, rows, simulate, train

SKIPPED = [{3}, {0, 2}, {1, 2}, {0, 1, 2, 3}]
"""By step: the blocks that the last rank calls without using them."""


class _Optional(nn.Module):
    """A block that a rank may call without using it, which no shared model has."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.is_used = True

    def forward(self, x):
        return self.inner(x) if self.is_used else torch.zeros_like(x)


def _launches(ranks, model, batches, case):
    log = []
    collectives = LoggedCollectives.factory(log)
    engine = case.build(ranks, model, collectives=collectives)
    train(engine, batches)
    engine.full_state_dict()
    engine.close()
    return log


def _with_branches(ranks, case):
    # Ranks leave out parts of blocks.
    return _launches(ranks, make_model(), [batch(n, 0, ranks.rank) for n in range(7)], case)


def _with_skipped_blocks(ranks, case):
    model = make_tower()
    model.blocks = nn.ModuleList(map(_Optional, model.blocks))

    def batches():
        for number, skipped in enumerate(SKIPPED):
            for index, block in enumerate(model.blocks):
                block.is_used = ranks.rank < ranks.size - 1 or index not in skipped
            yield rows(number, ranks.rank)

    return _launches(ranks, model, batches(), case)


def _with_blocks_left_out(ranks, case):
    # The first rank runs all blocks. Each other one leaves out one, and another one in each step.
    batches = []
    for number in range(6 * case.accumulation):
        left_out = (number + 3 * ranks.rank) % 6 if ranks.rank else None
        used = [block for block in range(6) if block != left_out]
        batches.append((rows(number, ranks.rank), used))
    return _launches(ranks, make_tower(6), batches, case)


# NCCL asks for it: communicators may share a hardware queue.
@pytest.mark.sampled(2)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    ("program", "accumulation", "recomputes"),
    [
        (_with_branches, 1, False),
        (_with_branches, 1, True),
        (_with_skipped_blocks, 1, False),
        *((_with_blocks_left_out, n, recomputes) for n in (1, 2) for recomputes in (False, True)),
    ],
)
def test_all_ranks_launch_everything_in_one_order(program, accumulation, stage, recomputes):
    top = {"activation_checkpointing": {}} if recomputes else {}
    first, *others = simulate(
        program, 3, Case(stage, accumulation=accumulation, top=top), timeout_s=30.0
    )
    assert any(launch.kind == "r" for launch in first)
    assert [[*map(str, log)] for log in others] == [[*map(str, first)]] * 2
    assert others == [first] * 2


def _connect(ranks):
    on_cuda = dataclasses.replace(ranks, device=torch.device("cuda", 0))
    make_transport(on_cuda, 2, None, Meter())


@pytest.mark.parametrize("connections", ["1", "8", None])
def test_one_hardware_queue_is_warned_of(monkeypatch, caplog, connections):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if connections is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    simulate(_connect, 2)
    assert ("CUDA_DEVICE_MAX_CONNECTIONS is 1" in caplog.text) == (connections == "1")
