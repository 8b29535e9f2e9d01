"""Quantized communication costs no more loss than its bar: the short gate of the long proof.

``nox -s bench -- comm_convergence`` trains all of it for 1000 steps and three seeds. This takes the
same model and the same programs for fewer steps of one seed.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from zero_core.testing import spawn
from zero_engine.bench.comm_training import (
    CONTEXT,
    NUM_RANKS,
    PLAIN,
    VOCAB,
    Job,
    Run,
    choose_nodes,
    train,
)
from zero_engine.data import Corpus, prepare_corpus, read_text

STEPS = 120
BOTH = (PLAIN, "qwZ", "hpZ", "qgZ", "all three", "4-bit")
JOBS = [
    *(Job(name, dtype, 0, STEPS) for dtype in ("fp32", "bf16") for name in BOTH),
    *(Job(name, "fp16", 0, STEPS) for name in (PLAIN, "all three")),
]

LEARNED = 4.8
"""Nats per token; guessing by frequency: 5.3."""
BOUND_PERCENT = {"qwZ": 1.0, "qgZ": 1.0, "all three": 1.0, "4-bit": 1.0}
"""How far the held-out loss may be from the unquantized one's."""


def _train(rank: int, world_size: int, folder: str, jobs: list[Job]) -> None:
    choose_nodes(rank)
    corpus = Corpus.open(Path(folder), seed=0)
    runs = [asdict(train(job, corpus)) for job in jobs]
    if rank == 0:
        (Path(folder) / "runs.json").write_text(json.dumps(runs))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> dict[tuple[str, str], Run]:
    folder = tmp_path_factory.mktemp("convergence")
    prepare_corpus(read_text(str(text_file)), folder, vocab_size=VOCAB, context=CONTEXT)
    spawn(_train, NUM_RANKS, str(folder), JOBS)
    found = [Run(**run) for run in json.loads((folder / "runs.json").read_text())]
    return {(run.dtype, run.contender): run for run in found}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_model_learns_without_quantization(runs: dict[tuple[str, str], Run], dtype: str) -> None:
    run = runs[dtype, PLAIN]
    assert run.is_finite
    assert run.held_out < LEARNED


@pytest.mark.parametrize(
    ("dtype", "name"), [(j.dtype, j.contender) for j in JOBS if j.contender in BOUND_PERCENT]
)
def test_held_out_loss_stays_near_the_unquantized_one(
    runs: dict[tuple[str, str], Run], dtype: str, name: str
) -> None:
    run, plain = runs[dtype, name], runs[dtype, PLAIN]
    assert run.is_finite
    assert run.skipped_steps == plain.skipped_steps
    assert abs(run.held_out / plain.held_out - 1.0) * 100.0 < BOUND_PERCENT[name]
    assert run.between_nodes_bytes < plain.between_nodes_bytes  # it was quantized at all


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_secondary_shards_change_no_bit(runs: dict[tuple[str, str], Run], dtype: str) -> None:
    run, plain = runs[dtype, "hpZ"], runs[dtype, PLAIN]
    assert (run.held_out, run.curve) == (plain.held_out, plain.curve)
    assert run.between_nodes_bytes < plain.between_nodes_bytes
