"""A reduction with its statistics is waited for where its sum or its memory is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

import zero_core
from zero_core.protocols import TransportCollectives, Work
from zero_core.testing import Case, SimulatedRanks, batch, device_collectives, make_model, simulate


class _Logged:
    """Collectives of an accelerator that note which reductions have been waited for."""

    def __init__(self, native: TransportCollectives) -> None:
        self._native = native
        self.all_gather = native.all_gather
        self.num_started = 0
        self.awaited: set[int] = set()

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        work: Any = self._native.reduce_scatter(out, full, unit=unit)
        self.num_started += 1
        return _LoggedReduction(self, work, self.num_started)


@dataclass
class _LoggedReduction:
    owner: _Logged
    work: Any
    number: int

    def wait(self) -> None:
        self.owner.awaited.add(self.number)
        self.work.wait()

    @property
    def norm(self) -> Tensor:
        return self.work.norm

    @property
    def nonfinite(self) -> Tensor:
        return self.work.nonfinite


def _train(ranks: SimulatedRanks, stage: int) -> None:
    logged = _Logged(device_collectives(ranks))
    engine = zero_core.build(
        make_model(),
        Case(stage=stage).config(),
        process_group=ranks,
        collectives=lambda native, **_: logged,
    )
    assert sum(s.is_trainable for s in engine.layout.segments) == 4
    for step in range(2):
        engine.backward(engine(**batch(step, 0, ranks.rank))["loss"])
        started = range(logged.num_started + 1)
        if stage == 1:  # full_grad is kept: nothing in backward uses it again
            assert not logged.awaited.intersection(started[-4:])
        else:  # a buffer is used again by the unit after the next
            assert not logged.awaited.intersection(started[-2:])
        engine.step()
        assert logged.awaited == set(started[1:])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_backward_waits_only_for_memory_that_it_uses_again(stage: int) -> None:
    simulate(_train, 2, stage)
