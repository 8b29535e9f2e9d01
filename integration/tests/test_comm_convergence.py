"""Quantized communication costs no more loss than its bar: the short gate of the long proof.

``nox -s bench -- comm_convergence`` trains all of it for 1000 steps and three seeds. This takes the
same model and the same programs for fewer steps of one seed.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from benchmarks.experiments.comm_training import (
    CONTEXT,
    NUM_RANKS,
    PLAIN,
    Training,
    choose_nodes,
    train,
)
from benchmarks.harness.ranks import Row
from zero_core.testing import spawn
from zero_engine.train.data import Corpus, prepare_corpus, read_text

STEPS = 40
BYTES_ONLY = 257
"""Vocabulary without merges: bytes are learned fastest."""
QUANTIZED = ("qwZ", "qgZ", "all three", "4-bit")
JOBS = [
    *(Training(name, "fp32", 0, STEPS) for name in (PLAIN, "all three", "4-bit")),
    *(Training(name, "bf16", 0, STEPS) for name in (PLAIN, "hpZ", *QUANTIZED)),
    *(Training(name, "fp16", 0, STEPS) for name in (PLAIN, "all three")),
]

# Percent from the unquantized run. Measured in bf16 with seeds 0, 1 and 2: held-out loss at most
# 0.8 away for qgZ and all three, 0.4 for 4 bits, 0.03 for qwZ; of the early steps, where runs have
# not drifted apart by chance yet, 0.4 for qgZ and for 4 bits.
# What a fault does to the early steps (made by hand, seed 0, in runs of 80 steps): 4-bit codes of
# 2 bits, qgZ 14 and the 4-bit mode 4.1; every block decoded with its neighbour's scale, qgZ 1.3; so
# with qwZ, 50 to the held-out loss. An error that differences lose does not show in so few steps:
# see test_secondary_shards.py.
HELD_OUT_BOUND = {"qwZ": 1.0, "qgZ": 2.0, "all three": 2.0, "4-bit": 2.0}
EARLY, EARLY_BOUND = slice(10, 30), 0.8
LEARNED = 3.4
"""Nats per byte; all alike: 5.5, guessing by frequency: 3.23. Seed 0 came to 3.29."""


def _train(rank: int, world_size: int, folder: str, jobs: list[Training]) -> None:
    choose_nodes(rank)
    corpus = Corpus.open(Path(folder), seed=0)
    runs = [train(job, corpus) for job in jobs]
    if rank == 0:
        (Path(folder) / "runs.json").write_text(json.dumps(runs))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> dict[tuple[str, str], Row]:
    folder = tmp_path_factory.mktemp("convergence")
    prepare_corpus(read_text(str(text_file)), folder, vocab_size=BYTES_ONLY, context=CONTEXT)
    spawn(_train, NUM_RANKS, str(folder), JOBS)
    found = json.loads((folder / "runs.json").read_text())
    return {(run["dtype"], run["contender"]): run for run in found}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_model_learns_without_quantization(runs: dict[tuple[str, str], Row], dtype: str) -> None:
    run = runs[dtype, PLAIN]
    assert run["is_finite"]
    assert run["held_out"] < LEARNED


@pytest.mark.parametrize(
    ("dtype", "name"), [(j.dtype, j.contender) for j in JOBS if j.contender in QUANTIZED]
)
def test_held_out_loss_stays_near_the_unquantized_one(
    runs: dict[tuple[str, str], Row], dtype: str, name: str
) -> None:
    run, plain = runs[dtype, name], runs[dtype, PLAIN]
    assert run["is_finite"]
    assert (
        abs(run["skipped_steps"] - plain["skipped_steps"]) <= 1
    )  # the loss scale finds its height
    assert abs(_percent(run["held_out"], plain["held_out"])) <= HELD_OUT_BOUND[name]
    early, plain_early = (statistics.fmean(r["curve"][EARLY]) for r in (run, plain))
    assert abs(_percent(early, plain_early)) <= EARLY_BOUND
    assert run["between_nodes_bytes"] < plain["between_nodes_bytes"]  # it was quantized at all


def _percent(value: float, reference: float) -> float:
    return 100.0 * (value / reference - 1.0)


def test_secondary_shards_change_no_bit(runs: dict[tuple[str, str], Row]) -> None:
    run, plain = runs["bf16", "hpZ"], runs["bf16", PLAIN]
    assert (run["held_out"], run["curve"]) == (plain["held_out"], plain["curve"])
    assert run["between_nodes_bytes"] < plain["between_nodes_bytes"]
