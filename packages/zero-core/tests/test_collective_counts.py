"""The exact number and order of collectives per unit, against counts made on paper.

Here B = 4 blocks (units 1 to 4, one segment each) and the root (unit 0).

[Note: counts on paper]
Parameters. At stage 0 every rank holds and updates everything: no gather. At stages 1 and 2 a rank
updates its slice alone: each unit is gathered once after an update, at the end of the step.
At stage 3 a unit is gathered before its forward and released after it, and again before its
backward, but for two: the root, which stays from forward to backward, and the last block, with
which backward begins. Forward: B + 1 gathers, 0 1 2 3 4; backward: B - 1, 3 2 1.
Gradients. Each backward outside ``no_sync`` reduces every unit once, B + 1 reductions, the blocks
from the last to the first and the root last: 4 3 2 1 0. At stage 0 alone the sum of an accumulation
boundary is then gathered, unit by unit in that order.
"""

import pytest
import torch
from support.launches import LoggedCollectives

from zero_core.testing import Case, make_tower, on_ranks, rows

FORWARD = ["f0", "f1", "f2", "f3", "f4"]
BACKWARD = ["b3", "b2", "b1"]  # gathers; the last block and the root are still there
REDUCED = ["r4", "r3", "r2", "r1", "r0"]
SUMS = ["g4", "g3", "g2", "g1", "g0"]


class _Run:
    """An engine, and what it sends."""

    def __init__(self, stage, ranks, accumulation=1):
        self.log = []
        self.stage = stage
        self.rank = ranks.rank
        self.published = FORWARD if stage in (1, 2) else []  # gathers that an update launches
        self.forward = FORWARD if stage == 3 else []
        self.back = BACKWARD if stage == 3 else []  # gathers of a backward after its forward
        self.sums = SUMS if stage == 0 else []  # gathers of gradients at a boundary
        logged = LoggedCollectives.factory(self.log)
        self.engine = Case(stage, accumulation=accumulation).build(
            ranks, make_tower(), collectives=logged
        )

    def loss(self):
        return self.engine(rows(0, self.rank))

    def micro_step(self):
        self.engine.backward(self.loss())
        self.engine.step()

    def expect(self, gathers, reductions, sums):
        """Gathers of parameters, reductions and gathers of gradients since the last call."""
        log, self.log[:] = [str(launch) for launch in self.log], []
        found = [[entry for entry in log if entry[0] in kinds] for kinds in ("fb", "r", "g")]
        assert found == [gathers, reductions, sums], (self.stage, log)


def _accumulation(run):
    count = run.engine.gradient_accumulation_steps
    for _ in range(3):
        for micro in range(count):
            run.micro_step()
            published, sums = (run.published, run.sums) if micro == count - 1 else ([], [])
            run.expect(run.forward + run.back + published, REDUCED, sums)


def _no_sync(run):
    for _ in range(2):
        for micro in range(3):
            if micro < 2:  # gradients stay on the rank
                with run.engine.no_sync():
                    run.micro_step()
                run.expect(run.forward + run.back, [], [])
            else:  # one reduction per unit and step
                run.micro_step()
                run.expect(run.forward + run.back + run.published, REDUCED, run.sums)


def _two_forwards(run):
    for _ in range(2):
        losses = run.loss() + run.loss()
        # The root is still there; the last block, which stayed, gives way to the second forward.
        again = ["f1", "f2", "f3", "f4"] if run.stage == 3 else []
        run.expect(run.forward + again, [], [])
        run.engine.backward(losses)
        run.engine.step()
        # Backward of the second forward, then of the first, for which the last block comes back.
        twice = [*BACKWARD, "b4", *BACKWARD] if run.stage == 3 else []
        run.expect(twice + run.published, REDUCED, run.sums)


def _two_backwards(run):
    for _ in range(2):
        for _ in range(2):
            run.engine.backward(run.loss())
            # Each backward is reduced; each is at the boundary, so at stage 0 each sum is gathered.
            run.expect(run.forward + run.back, REDUCED, run.sums)
        run.engine.step()
        run.expect(run.published, [], [])


def _evaluation(run):
    run.micro_step()
    run.log.clear()
    run.engine.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            run.loss()
        # A forward's gathers and nothing else: without gradients everything is released at its end.
        run.expect(run.forward, [], [])
    run.engine.train()
    run.micro_step()
    run.expect(run.forward + run.back + run.published, REDUCED, run.sums)


def _gathered(run):
    run.micro_step()
    run.log.clear()
    with run.engine.gathered() as module:
        run.expect(run.forward, [], [])  # once each
        with torch.no_grad():
            for _ in range(3):
                module(rows(0, 0))
        run.expect([], [], [])
    run.engine.publish()
    run.expect([], [], [])


_RUNS = {
    "a plain step": (_accumulation, 1),
    "accumulation": (_accumulation, 3),
    "no_sync": (_no_sync, 3),
    "two forwards, one backward": (_two_forwards, 1),
    "two backwards, one step": (_two_backwards, 1),
    "evaluation": (_evaluation, 1),
    "gathered": (_gathered, 1),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", _RUNS)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_the_collectives_are_those_counted_on_paper(ranks, stage, name):
    run, accumulation = _RUNS[name]
    run(_Run(stage, ranks, accumulation))


@pytest.mark.parametrize("stage", range(4))
@on_ranks(1)
def test_one_rank_sends_nothing(ranks, stage):
    # A reduction is its own sum, kept until the boundary.
    run = _Run(stage, ranks, accumulation=2)
    for _ in range(4):
        run.micro_step()
    assert run.log == []
