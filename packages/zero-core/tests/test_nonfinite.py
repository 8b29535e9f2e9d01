"""A gradient that is not finite is traced to the parameter and to the rank whose batch made it."""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from zero_core.testing import (
    Case,
    SimulatedRanks,
    device_collectives,
    on_ranks,
    seeded,
    simulate,
)


class _Scaled(nn.Module):
    """Two blocks whose outputs are summed, so that one can be spoilt without the other."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(0):
            self.blocks = nn.ModuleList(nn.Linear(3, 5, bias=False) for _ in range(2))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.blocks[0](first).sum() + self.blocks[1](second).sum()


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        own = threading.get_ident()
        self.addFilter(lambda record: record.thread == own)  # of this rank
        logging.getLogger("zero_core").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _inputs(*, is_spoilt: bool) -> tuple[Tensor, Tensor]:
    good, bad = torch.ones(2, 3), torch.full((2, 3), torch.inf)
    return good, bad if is_spoilt else good


def _values(engine: zero_core.Engine) -> dict[str, Tensor]:
    return engine.full_state_dict(dtype=torch.float32)


def _spoil(ranks: SimulatedRanks, dtype: str, bad_micro: int, is_local: bool, stage: int) -> None:
    culprit = ranks.size - 1
    case = Case(stage, "fp32" if dtype == "fp16" else dtype, accumulation=2)
    engine = zero_core.build(
        _Scaled(),
        case.config() | {"fp16": {"enabled": dtype == "fp16", "loss_scale": 2.0}},
        process_group=ranks,
    )
    records, before = _Records(), _values(engine)
    for step in range(2):
        for micro in range(2):
            is_spoilt = ranks.rank == culprit and (step, micro) == (0, bad_micro)
            with engine.no_sync() if is_local and micro == 0 else nullcontext():
                engine.backward(engine(*_inputs(is_spoilt=is_spoilt)))
            engine.step()
        assert engine.optimizer.overflow == (step == 0)
        after = _values(engine)
        assert all(torch.equal(after[name], value) == (step == 0) for name, value in before.items())
    assert engine.skipped_steps == 1
    (text,) = records.texts
    assert f"(blocks.1.weight: batch of rank {culprit})" in text


@pytest.mark.parametrize(
    ("world_size", "dtype", "stage"),
    [
        *((2, "fp32", stage) for stage in range(4)),
        *((1, "fp32", 0), (1, "bf16", 3), (1, "fp16", 2), (2, "bf16", 0), (2, "fp16", 3)),
        *((3, "fp32", 3), (3, "bf16", 1), (3, "bf16", 2), (3, "fp16", 0), (3, "fp16", 1)),
    ],
)
def test_a_spoilt_batch_is_named_with_its_rank_and_the_step_is_skipped_by_all(
    world_size, dtype, stage
):
    simulate(_spoil, world_size, dtype, 1, False, stage)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("is_local", [False, True])
def test_a_spoilt_batch_of_an_earlier_micro_step_is_named_too(is_local, stage):
    simulate(_spoil, 2, "fp32", 0, is_local, stage)


@on_ranks(2)
def test_a_sum_that_overflows_blames_no_rank(ranks: SimulatedRanks) -> None:
    engine = zero_core.build(_Scaled(), Case(stage=1).config(), process_group=ranks)
    records = _Records()
    big = torch.full((1, 3), 3e38)  # what each rank contributes: four backwards of a quarter
    for _ in range(3):
        with engine.no_sync():
            engine.backward(engine(torch.ones(1, 3), big) * 0.5)
    engine.backward(engine(torch.ones(1, 3), big) * 0.5)
    engine.step()
    assert "(blocks.1.weight: each rank's part is finite, their sum is not)" in records.texts[0]


class _Reticent:
    """Collectives that do not show each rank's part of a sum."""

    def __init__(self, native: Any, **_: Any) -> None:
        self.all_gather = native.all_gather
        self._native = native

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Any:
        work = self._native.reduce_scatter(out, full, unit=unit)
        work.contributions = ()
        return work


CULPRITS: dict[str, tuple[int, int, tuple[int, ...], bool, str]] = {
    # Ranks, how many of them share a node, who spoils, on accelerators, what is said.
    "several": (3, 3, (0, 2), False, "batches of ranks 0, 2"),
    "of two nodes": (4, 2, (1, 2), True, "batches of ranks 1, 2"),
    "of one node": (4, 4, (1, 2), True, "batches of ranks 1, 2"),
    "unseen": (2, 2, (1,), False, "which rank's batch did it is not known"),
}


def _is_told(ranks: SimulatedRanks, which: str) -> None:
    _, _, culprits, is_device, said = CULPRITS[which]

    def on_device(native: Any, **_: Any) -> Any:
        return device_collectives(ranks)

    collectives = on_device if is_device else _Reticent if which == "unseen" else None
    engine = zero_core.build(
        _Scaled(), Case(stage=2).config(), collectives=collectives, process_group=ranks
    )
    records = _Records()
    engine.backward(engine(*_inputs(is_spoilt=ranks.rank in culprits)))
    engine.step()
    assert f"(blocks.1.weight: {said})" in records.texts[0]


@pytest.mark.parametrize("which", CULPRITS)
def test_the_ranks_at_fault_are_named_where_their_parts_of_the_sum_are_seen(which):
    world_size, per_node, *_ = CULPRITS[which]
    simulate(_is_told, world_size, which, ranks_per_node=per_node)
