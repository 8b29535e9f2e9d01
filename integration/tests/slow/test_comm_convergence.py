"""Quantized communication costs no more loss than its bar: the short gate of the long proof.

``nox -s bench -- comm_convergence`` trains all of it for 1000 steps and three seeds. This takes the
same model and the same settings for fewer steps of one seed, on simulated ranks. In fp32,
test_messages.py bounds how far quantized runs go from exact ones.
"""

from __future__ import annotations

import copy
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_core
from benchmarks.harness.models import Gpt
from lab.experiments.comm_convergence import (
    CONTENDERS,
    MICRO_BATCH,
    NUM_RANKS,
    PLAIN,
    RANKS_PER_NODE,
    SHAPE,
)
from lab.text import training_config
from zero_core.testing import SimulatedRanks, simulate
from zero_engine.train.data import Corpus, prepare_corpus, read_text

STEPS = 30
HELD_OUT_WINDOWS, HELD_OUT_BATCH = 512, 8
BYTES_ONLY = 257
"""Vocabulary without merges: bytes are learned fastest."""
QUANTIZED = ("all three", "4-bit")
JOBS = [
    *(("bf16", name) for name in (PLAIN, *QUANTIZED)),
    *(("fp16", name) for name in (PLAIN, "all three")),
]
"""Dtype and contender. A fault of qwZ or qgZ shows in ``all three``; the bench has each alone."""

# Percent from the unquantized run. Measured in bf16 with seeds 0, 1 and 2: held-out loss at most
# 0.8 away for qgZ and all three, 0.4 for 4 bits, 0.03 for qwZ; of the early steps, where runs have
# not drifted apart by chance yet, 0.4 for qgZ and for 4 bits.
# What a fault does to the early steps (made by hand, seed 0): 4-bit codes of 2 bits, qgZ 18 and the
# 4-bit mode 4.7; every block decoded with its neighbour's scale, qgZ 2.2 and the 4-bit mode 5.1; so
# with qwZ, 57 to the held-out loss. An error that differences lose does not show in so few steps:
# see test_messages.py.
HELD_OUT_BOUND = 2.0
EARLY, EARLY_BOUND = slice(10, 30), 0.8
LEARNED = 3.45
"""Nats per byte; all alike: 5.5, guessing by frequency: 3.23. Measured 3.39, in fp16 3.40."""


@dataclass
class Run:
    """A run's losses in nats per token, as means over all ranks, and one rank's bytes per step."""

    curve: list[float]
    held_out: float
    skipped_steps: int
    between_nodes_bytes: int


def _train(ranks: SimulatedRanks, dtype: str, name: str, model: Gpt, corpus: Corpus) -> Run:
    """Train one rank's part of a run."""
    config: dict[str, Any] = {
        **training_config(STEPS),
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16"},
        "zero_optimization": {"stage": 3, **CONTENDERS[name]},
    }
    engine = zero_core.build(copy.deepcopy(model), config, process_group=ranks)
    place = {"rank": engine.rank, "world_size": engine.world_size}
    losses = []
    for step in range(STEPS):
        loss = engine(corpus.batch(step, **place, micro_batch_size=MICRO_BATCH))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    report = engine.comm_report()
    engine.eval()
    held_out = corpus.held_out_batches(HELD_OUT_WINDOWS, **place, micro_batch_size=HELD_OUT_BATCH)
    with torch.no_grad():
        mean = statistics.fmean(engine(ids).item() for ids in held_out)
    engine.close()
    return Run(losses, mean, engine.skipped_steps, sum(row.between_nodes_bytes for row in report))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> dict[tuple[str, str], Run]:
    folder = tmp_path_factory.mktemp("convergence")
    prepare_corpus(read_text(str(text_file)), folder, vocab_size=BYTES_ONLY, context=SHAPE.context)
    corpus = Corpus.open(folder, seed=0)
    torch.manual_seed(0)
    model = Gpt(replace(SHAPE, vocab=BYTES_ONLY))
    found = {}
    for job in JOBS:
        parts = simulate(_train, NUM_RANKS, *job, model, corpus, ranks_per_node=RANKS_PER_NODE)
        curve = [statistics.fmean(losses) for losses in zip(*(p.curve for p in parts), strict=True)]
        held_out = statistics.fmean(p.held_out for p in parts)
        found[job] = Run(curve, held_out, parts[0].skipped_steps, parts[0].between_nodes_bytes)
    return found


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_model_learns_without_quantization(runs: dict[tuple[str, str], Run], dtype: str) -> None:
    run = runs[dtype, PLAIN]
    assert all(map(math.isfinite, run.curve))
    assert run.held_out < LEARNED


@pytest.mark.parametrize(("dtype", "name"), [job for job in JOBS if job[1] in QUANTIZED])
def test_held_out_loss_stays_near_the_unquantized_one(runs, dtype, name):
    run, plain = runs[dtype, name], runs[dtype, PLAIN]
    assert all(map(math.isfinite, run.curve))
    # The loss scale finds its height.
    assert abs(run.skipped_steps - plain.skipped_steps) <= 1
    assert abs(_percent(run.held_out, plain.held_out)) <= HELD_OUT_BOUND
    early, plain_early = (statistics.fmean(r.curve[EARLY]) for r in (run, plain))
    assert abs(_percent(early, plain_early)) <= EARLY_BOUND
    assert run.between_nodes_bytes < plain.between_nodes_bytes  # it was quantized at all


def _percent(value: float, reference: float) -> float:
    return 100.0 * (value / reference - 1.0)
