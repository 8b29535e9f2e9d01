"""Neither a deferred construction nor loading ever holds the whole model, as the kernel sees it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zero_core
from zero_core.testing import PeakMemory, spawn

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


def _measure(rank: int, world_size: int, folder: str) -> None:
    _warm_up()
    torch.manual_seed(0)
    with PeakMemory() as peak:
        with zero_core.deferred_init():
            model = _model()
        engine = zero_core.build(model, CONFIG)
    kept = engine.memory_report()["parameters"]  # nothing else has been written to
    assert kept < MODEL_BYTES / world_size * 1.01, "this rank's shards"
    assert peak.nbytes >= kept * 0.9, "the measurement sees what is there"
    # A unit whole, and on the rank that computes values the parameter that is being made.
    bound = kept + 2 * UNIT_BYTES + SLACK_BYTES
    assert bound < kept + MODEL_BYTES / 3, "a whole model would be seen"
    assert peak.nbytes <= bound, ("deferred", rank, peak.nbytes, bound)

    with PeakMemory() as peak:
        zero_core.load_pretrained(engine, folder)
    assert peak.nbytes <= UNIT_BYTES + SLACK_BYTES, ("load_pretrained", rank, peak.nbytes)
    del engine, model

    with PeakMemory() as peak:
        with torch.device("meta"):
            model = _model()
        zero_core.build(model, CONFIG, pretrained=folder)
    assert peak.nbytes <= bound, ("pretrained", rank, peak.nbytes, bound)
    del model

    with PeakMemory() as peak:
        with torch.device("meta"):
            model = _model()
        zero_core.quantize_blocks(model, _to_int8, pretrained=folder)
        engine = zero_core.build(model, CONFIG)
    kept = engine.memory_report()["parameters"]
    assert kept < MODEL_BYTES / 4 / world_size * 1.05, "this rank's shards, one byte an element"
    # A block in full precision, and two temporaries of its size that quantize it.
    bound = kept + 3 * UNIT_BYTES + SLACK_BYTES
    assert bound < MODEL_BYTES / 4 + 2 * UNIT_BYTES, "a whole quantized model would be seen"
    assert peak.nbytes <= bound, ("quantized", rank, peak.nbytes, bound)


def _to_int8(linear: nn.Module) -> None:
    scale = linear.weight.abs().amax() / 127
    linear.weight.div_(scale).round_()
    linear.weight = nn.Parameter(linear.weight.to(torch.int8), requires_grad=False)
    linear.register_buffer("scale", scale)


@pytest.mark.slow
def test_no_rank_holds_more_than_its_shards_and_a_unit(tmp_path: Path) -> None:
    save_file(_model().state_dict(), tmp_path / "model.safetensors")
    spawn(_measure, 3, str(tmp_path))
