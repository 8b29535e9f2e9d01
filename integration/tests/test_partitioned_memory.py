"""No rank holds the whole model when values are written before there is an engine."""

from __future__ import annotations

import sys

import pytest
from torch import nn

import zero_core
from zero_core.testing import PeakMemory, spawn
from zero_engine.deepspeed.zero.partitioned import gathered_params
from zero_engine.deepspeed.zero.partitioned_init import partitioned_init

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")

WIDTH, DEPTH = 1024, 25
UNIT_BYTES = 4 * WIDTH * (WIDTH + 1)
MODEL_BYTES = DEPTH * UNIT_BYTES  # 105 MB
# What the process does besides: threads, messages between ranks, the allocator's fragments.
SLACK_BYTES = 8 * 1024**2
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


def _model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def _warm_up() -> None:
    """A small engine: what torch and gloo allocate when first used is there before."""
    with zero_core.deferred_init():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    zero_core.build(model, CONFIG).close()


def _measure_sharded(rank: int, world_size: int) -> None:
    """Values are written between construction and build, one module at a time."""
    _warm_up()
    with PeakMemory() as peak:
        with partitioned_init():
            model = _model()
        for number, layer in enumerate(model):
            with gathered_params(layer.parameters(), modifier_rank=0):
                if rank == 0:
                    layer.weight.data.fill_(number)
    parts = MODEL_BYTES / world_size
    assert peak.nbytes >= parts * 0.9, "the measurement sees what is there"
    bound = parts + 2 * UNIT_BYTES + SLACK_BYTES
    assert bound < parts + MODEL_BYTES / 3, "a whole model would be seen"
    assert peak.nbytes <= bound, ("written", rank, peak.nbytes, bound)

    with PeakMemory() as peak:
        engine = zero_core.build(model, CONFIG)
    kept = engine.memory_report()["parameters"]
    assert peak.nbytes <= kept + 2 * UNIT_BYTES + SLACK_BYTES, ("built", rank, peak.nbytes, kept)
    with engine.gathered():
        assert all(bool((x.weight == number).all()) for number, x in enumerate(model))


def test_no_rank_holds_more_when_values_are_written_before_there_is_an_engine() -> None:
    spawn(_measure_sharded, 3)
