"""At stage 0 the sums of gradients are gathered beside backward, and waited for by ``step``."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import zero_core
from zero_core.protocols import EXACT_GRADIENTS, TransportCollectives, Work
from zero_core.testing import Case, SimulatedRanks, batch, make_model, simulate


class _Logged:
    """Notes when the gathers of gradients are waited for."""

    def __init__(self, native: TransportCollectives, **_: Any) -> None:
        self._native = native
        self.reduce_scatter = native.reduce_scatter
        self.num_started = self.num_awaited = 0

    def all_gather(self, out: Tensor, shard: Tensor, *, version: int, **further: Any) -> Work:
        work = self._native.all_gather(out, shard, version=version, **further)
        if version != EXACT_GRADIENTS:
            return work
        self.num_started += 1
        return _LoggedWork(self, work)


class _LoggedWork:
    def __init__(self, owner: _Logged, work: Work) -> None:
        self._owner = owner
        self._work = work

    def wait(self) -> None:
        self._owner.num_awaited += 1
        self._work.wait()


def _train(ranks: SimulatedRanks, accumulation: int) -> None:
    made: list[_Logged] = []

    def factory(native: TransportCollectives, **given: Any) -> _Logged:
        made.append(_Logged(native, **given))
        return made[0]

    config = Case(stage=0, accumulation=accumulation).config()
    engine = zero_core.build(make_model(), config, process_group=ranks, collectives=factory)
    (logged,) = made
    num_segments = sum(s.is_trainable for s in engine.layout.segments)
    for step in range(2):
        for micro in range(accumulation):
            engine.backward(engine(**batch(step, micro, ranks.rank))["loss"])
            # The gathers of the step's last reductions may start in `step`.
            assert logged.num_awaited == step * num_segments
            engine.step()
        assert logged.num_started == logged.num_awaited == (step + 1) * num_segments


@pytest.mark.parametrize("accumulation", [1, 2])
def test_no_gather_of_gradients_is_waited_for_in_backward(accumulation: int) -> None:
    simulate(_train, 2, accumulation)


def _drop(ranks: SimulatedRanks) -> None:
    """A step that is dropped after its gathers began: the next one's values are right."""
    losses = []
    for drops in (False, True):
        engine = zero_core.build(make_model(), Case(stage=0).config(), process_group=ranks)
        if drops:
            engine.backward(engine(**batch(9, 0, ranks.rank))["loss"])
            engine.optimizer.zero_grad()
        for step in range(3):
            loss = engine(**batch(step, 0, ranks.rank))["loss"]
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        engine.close()
    assert losses[:3] == losses[3:]


def test_a_dropped_step_leaves_no_gather_behind() -> None:
    simulate(_drop, 2)
