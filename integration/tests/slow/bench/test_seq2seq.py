"""The T5 under a memory cap: the search, the whole experiment, tiny, and what its rows mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import command
from benchmarks.experiments import seq2seq
from benchmarks.harness.job import Job
from benchmarks.harness.models import T5, GptShape
from benchmarks.harness.ranks import Row, Runner

SHAPE = GptShape(layers=2, width=64, heads=16, vocab=100, context=8)
JOB = seq2seq.job_of("zero-2", SHAPE, 1, "fp32")
CAP = 1000


def peaks(peak: Callable[[int], int]) -> tuple[list[int], seq2seq.Attempt]:
    """Return the batches that are tried, and an attempt whose peaks are ``peak`` of the batch."""
    tried: list[int] = []

    def attempt(batch: int) -> Row:
        tried.append(batch)
        return {"peak_bytes": peak(batch), "is_over": peak(batch) > CAP}

    return tried, attempt


@pytest.mark.parametrize("each", [3, 11, 40, 200, 700])
@pytest.mark.parametrize("fixed", [0, 290])
def test_search_ends_at_the_largest_batch_that_fits(each: int, fixed: int) -> None:
    tried, attempt = peaks(lambda batch: fixed + each * batch)
    row = seq2seq.largest_batch(attempt, CAP, 500)
    assert row["batch"] == (CAP - fixed) // each
    assert len(set(tried)) == len(tried) <= 6
    assert [one["batch"] for one in row["tries"]] == sorted(tried)


def test_search_ends_where_peaks_are_on_no_line() -> None:
    _, attempt = peaks(lambda batch: 600 if batch < 20 else 999 if batch < 33 else 5000)
    assert seq2seq.largest_batch(attempt, CAP, 500)["batch"] == 32
    _, attempt = peaks(lambda _: 10)
    assert seq2seq.largest_batch(attempt, CAP, 50)["batch"] == 50


def test_contender_of_which_no_sample_fits_has_no_batch() -> None:
    _, attempt = peaks(lambda batch: CAP + batch)
    row = seq2seq.largest_batch(attempt, CAP, 50)
    assert row["failure"] == "micro-batch 1 is over the cap of 0 MiB"
    assert "batch" not in row


def test_error_is_no_batch_that_does_not_fit() -> None:
    error = {"failure": "RuntimeError: gloo: connection reset"}
    tried, _ = peaks(lambda _: 1)

    def attempt(batch: int) -> Row:
        tried.append(batch)
        return error

    assert seq2seq.largest_batch(attempt, CAP, 50) == error
    assert len(tried) == 1


def test_run_that_is_over_the_cap_has_a_smaller_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(job: Job, cap: int, samples: object, runner: Runner) -> Row:
        if job.micro_batch > 3:
            return {"peak_bytes": CAP + 1, "is_over": True}
        seconds = next(times)
        measured = {"train_s": seconds, "eval_s": 2 * seconds, "loss": 1.0}
        return {**measured, "train_peak_bytes": 8, "peak_bytes": 9, "is_over": False}

    times = iter([4.0, 2.0])
    monkeypatch.setattr(seq2seq, "start", start)
    searched = {"zero-2": {"batch": 5, "tries": []}, "zero-3": {"failure": "no room"}}
    jobs = dict.fromkeys(searched, JOB)
    samples = {"train": 8, "evaluate": 4}
    rows = seq2seq.timed(jobs, searched, CAP, samples, 2, Runner())
    assert rows["zero-3"] == {"failure": "no room"}
    assert rows["zero-2"]["batch"] == 3
    assert rows["zero-2"]["train_s"] == 3.0
    assert rows["zero-2"]["times_s"] == {"train_s": [4.0, 2.0], "eval_s": [8.0, 4.0]}


def test_ratios_of_the_post_are_its_own() -> None:
    rows = seq2seq.compared(seq2seq.POST, "baseline")
    ratios = [rows["deepspeed"][f"{what}_ratio"] for what in ("batch", "train", "eval")]
    assert ratios == pytest.approx([2.5, 3.0, 1.6], abs=0.05)


def test_contenders_train_alike_within_the_cap(tmp_path: Path) -> None:
    names = ("ddp", "fsdp2", "zero-2", "zero-3-offload")
    sizes = ("--layers=2", "--width=128", "--most=2", "--train-samples=8", "--eval-samples=4")
    done = CliRunner().invoke(
        command("seq2seq"),
        [*sizes, "--rounds=1", *(f"--only={name}" for name in names), f"--output={tmp_path}"],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "seq2seq.json").read_text())
    with_figures = {n: row for n, row in report["contenders"].items() if "train_s" in row}
    assert list(with_figures) == list(names)
    for name, row in with_figures.items():
        assert row["batch"] == 2, name
        assert 0 < row["train_peak_bytes"] <= row["peak_bytes"] <= report["cap_bytes"]
        assert row["eval_s"] > 0
        assert row["loss"] == pytest.approx(with_figures["ddp"]["loss"], rel=1e-5), name
        assert row["batch_ratio"] == 1.0
    assert (tmp_path / "seq2seq.png").stat().st_size > 0


def test_rank_over_the_cap_ends_all_and_says_how_much_it_had() -> None:
    samples = {"train": 4, "evaluate": 4}
    row = seq2seq.start(JOB, 2**20, samples, Runner())
    assert row["is_over"] is True
    assert row["peak_bytes"] > 2**20
    assert "train_s" not in row
    assert "failure" not in row


def test_beams_are_as_long_as_the_source() -> None:
    job = JOB
    tokens = T5(SHAPE).generate(next(job.batches(0)), beams=2)
    assert tokens.shape == (job.micro_batch, SHAPE.context + 1)
