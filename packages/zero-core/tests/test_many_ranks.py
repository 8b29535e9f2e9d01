"""A single process as one rank of 1024, in a process group that sends nothing."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import zero_core
from zero_core.comm.control import ControlGroup
from zero_core.comm.groups import Ranks
from zero_core.testing import Case, make_tower, rows, train

WORLD_SIZE, WIDTH = 1024, 96


class SilentRanks(Ranks):
    """Ranks whose control group uses the backend's collectives, not point-to-point messages."""

    def connect(self, named_within_s=None):
        return ControlGroup(self.library(), self.device)


@pytest.fixture(params=[0, 1023], ids=lambda rank: f"rank{rank}")
def rank(request, monkeypatch):
    rank = request.param
    # The fake backend does not compute sums, and a step compares the ranks' settings by a sum.
    monkeypatch.setattr(ControlGroup, "sum", lambda _, values: values.mul_(WORLD_SIZE))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD_SIZE)
    yield rank
    dist.destroy_process_group()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_among_1024_ranks_holds_what_was_planned(rank, stage):
    # The fake backend leaves received values undefined, so gradients may be non-finite.
    config = Case(stage, "bf16", top={"check_grad_overflow": False}).config()
    with torch.device("meta"):
        planned = zero_core.plan(
            make_tower(3, WIDTH), config, WORLD_SIZE, device_type="cpu"
        ).memory.device
    ranks = SilentRanks(None, rank, WORLD_SIZE, torch.device("cpu"))
    engine = zero_core.build(make_tower(3, WIDTH), config, process_group=ranks)
    train(engine, [rows(0, 0, WIDTH)] * 2)
    assert (engine.global_steps, engine.skipped_steps) == (2, 0)
    held = {kind: nbytes for kind, nbytes in engine.memory_report().items() if nbytes}
    assert held == {kind: planned[kind] for kind in held}
    numel = sum(s.shard_numel for s in engine.layout.segments)
    assert held["gradient shards"] == 4 * numel
    assert planned["optimizer states"] == 8 * numel
    owned = engine.layout.pieces(rank, is_sharded=True)
    assert bool(owned) == (rank == 0)  # the last rank's shards are only padding
    tier = engine.sharded_state.tier
    names = tier.state_names()[1:]
    states = [tier.read_state(name, 0, numel) for name in names]
    assert sum(t.nbytes for t in states) == (planned["optimizer states"] if owned else 0)
    assert all(tier.read_scalars(i)["num_steps"] == 2.0 for i in range(len(owned)))
    engine.close()
