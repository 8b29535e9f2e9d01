"""Reductions, and gathers of their sums at stage 0, are waited for where they are used."""

import pytest

from zero_core.protocols import EXACT_GRADIENTS
from zero_core.testing import Case, batch, device_collectives, on_ranks


class _Logged:
    """Collectives that note which reductions and gathers of gradients have been waited for."""

    def __init__(self, native):
        self._native = native
        self.num_started = {"reductions": 0, "gathers": 0}
        self.awaited = {"reductions": set(), "gathers": set()}

    def all_gather(self, out, shard, *, version, **further):
        work = self._native.all_gather(out, shard, version=version, **further)
        return self._start("gathers", work) if version == EXACT_GRADIENTS else work

    def reduce_scatter(self, out, full, *, unit):
        return self._start("reductions", self._native.reduce_scatter(out, full, unit=unit))

    def _start(self, kind, work):
        self.num_started[kind] += 1
        return _LoggedWork(self.awaited[kind], self.num_started[kind], work)


class _LoggedWork:
    def __init__(self, awaited, number, work):
        self._awaited = awaited
        self._number = number
        self._work = work

    def __getattr__(self, name):
        return getattr(self._work, name)

    def wait(self):
        self._awaited.add(self._number)
        self._work.wait()


def _build(ranks, logged, case):
    return case.build(ranks, collectives=lambda native, **_: logged)


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_backward_waits_only_for_memory_that_it_uses_again(ranks, stage):
    logged = _Logged(device_collectives(ranks))
    engine = _build(ranks, logged, Case(stage))
    assert sum(s.is_trainable for s in engine.layout.segments) == 4
    # At stage 1 full_grad is kept: nothing in backward uses it again. Else a buffer is used again
    # by the unit after the next.
    num_late = 4 if stage == 1 else 2
    for step in range(2):
        engine.backward(engine(**batch(step, 0, ranks.rank))["loss"])
        started = range(logged.num_started["reductions"] + 1)
        assert not logged.awaited["reductions"].intersection(started[-num_late:])
        engine.step()
        assert logged.awaited["reductions"] == set(started[1:])


@pytest.mark.parametrize("accumulation", [1, 2])
@on_ranks(2)
def test_no_gather_of_gradients_is_waited_for_in_backward(ranks, accumulation):
    logged = _Logged(device_collectives(ranks))
    engine = _build(ranks, logged, Case(0, accumulation=accumulation))
    num_segments = sum(s.is_trainable for s in engine.layout.segments)
    for step in range(2):
        for micro in range(accumulation):
            engine.backward(engine(**batch(step, micro, ranks.rank))["loss"])
            # The gathers of the step's last reductions may start in `step`.
            assert len(logged.awaited["gathers"]) == step * num_segments
            engine.step()
        assert logged.num_started["gathers"] == (step + 1) * num_segments
        assert len(logged.awaited["gathers"]) == (step + 1) * num_segments
