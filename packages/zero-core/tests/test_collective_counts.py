"""Number and order of collectives: derived by hand, and equal on all ranks.

The model has B = 4 blocks (units 1 to 4, one segment each) and the root (unit 0).

[Note: derived counts]
Parameters. Stage 0 gathers none, because every rank holds and updates all values. At stages 1 and 2
a rank updates only its shard, so each unit is gathered once at the end of a step.
Stage 3 gathers a unit before its forward, releases it afterwards and gathers it again before its
backward. Two units stay gathered from forward to backward: the root, and the last block, where
backward begins. Forward: B + 1 gathers, 0 1 2 3 4. Backward: B - 1 gathers, 3 2 1.
Gradients. Each backward outside ``no_sync`` reduces every unit once, which is B + 1 reductions in
the order 4 3 2 1 0. At an accumulation boundary, stage 0 gathers the sums in the same order.
"""

import dataclasses

import pytest
import torch
from support.launches import LoggedCollectives
from torch import nn

from zero_core.comm.device import make_transport
from zero_core.comm.meter import Links, Meter
from zero_core.testing import Case, batch, make_model, make_tower, on_ranks, rows, simulate, train

FORWARD = ["f0", "f1", "f2", "f3", "f4"]
BACKWARD = ["b3", "b2", "b1"]  # the last block and the root stay gathered after forward
REDUCED = ["r4", "r3", "r2", "r1", "r0"]
SUMS = ["g4", "g3", "g2", "g1", "g0"]


class _Run:
    def __init__(self, stage, ranks, accumulation=1):
        self.log = []
        self.stage = stage
        self.rank = ranks.rank
        self.published = FORWARD if stage in (1, 2) else []
        self.forward = FORWARD if stage == 3 else []
        self.back = BACKWARD if stage == 3 else []
        self.sums = SUMS if stage == 0 else []
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
            if micro < 2:
                with run.engine.no_sync():
                    run.micro_step()
                run.expect(run.forward + run.back, [], [])
            else:
                run.micro_step()
                run.expect(run.forward + run.back + run.published, REDUCED, run.sums)


def _two_forwards(run):
    for _ in range(2):
        losses = run.loss() + run.loss()
        # At stage 3 the root stays gathered, and the second forward gathers the last block again.
        again = ["f1", "f2", "f3", "f4"] if run.stage == 3 else []
        run.expect(run.forward + again, [], [])
        run.engine.backward(losses)
        run.engine.step()
        # At stage 3 backward of the second forward runs first and releases the last block.
        twice = [*BACKWARD, "b4", *BACKWARD] if run.stage == 3 else []
        run.expect(twice + run.published, REDUCED, run.sums)


def _two_backwards(run):
    for _ in range(2):
        for _ in range(2):
            run.engine.backward(run.loss())
            # Each backward is at an accumulation boundary, so stage 0 gathers each sum.
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
        # At stage 3 a forward without gradients leaves no unit gathered.
        run.expect(run.forward, [], [])
    run.engine.train()
    run.micro_step()
    run.expect(run.forward + run.back + run.published, REDUCED, run.sums)


def _gathered(run):
    run.micro_step()
    run.log.clear()
    with run.engine.gathered() as module:
        run.expect(run.forward, [], [])
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


SKIPPED = [{3}, {0, 2}, {1, 2}, {0, 1, 2, 3}]
"""Blocks whose parameters the last rank does not use, by step."""


class _Optional(nn.Module):
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
    # Rank 0 runs all blocks. Every other rank leaves out one block, a new one per micro-batch.
    batches = []
    for number in range(6 * case.accumulation):
        left_out = (number + 3 * ranks.rank) % 6 if ranks.rank else None
        used = [block for block in range(6) if block != left_out]
        batches.append((rows(number, ranks.rank), used))
    return _launches(ranks, make_tower(6), batches, case)


# Orders must be equal on all ranks, because NCCL's communicators may share a hardware queue.
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
    make_transport(on_cuda, None, Meter(Links(2, 2, is_ring=True)))


@pytest.mark.parametrize("connections", ["1", "8", None])
def test_one_hardware_queue_is_warned_of(monkeypatch, caplog, connections):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if connections is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    simulate(_connect, 2)
    assert ("CUDA_DEVICE_MAX_CONNECTIONS is 1" in caplog.text) == (connections == "1")
