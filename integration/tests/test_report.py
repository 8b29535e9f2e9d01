"""Reports: one HTML file that names a run's bottleneck and escapes all text of the run."""

from __future__ import annotations

import html
import html.parser
import json
import math
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner

import zero_core
from zero_core.config import load_config
from zero_core.records import DetailRecord, EventRecord, RecordFile, RunRecord, StepRecord
from zero_core.testing import make_tower, rows, train
from zero_engine.cli import app
from zero_engine.report import write_report
from zero_engine.report.compose import _TITLES, _merged, first_sentence
from zero_engine.report.run import kept_bytes, read_run

HOSTILE = "</script><img src=x onerror=alert(1)>\u2028'\"&"
# Like a recorded configuration, this one contains the defaults of all keys.
CONFIG: dict[str, Any] = load_config(
    {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}, world_size=2
).model_dump(mode="json")
ENVIRONMENT = {"device": "cpu", "cores": 2, "threads": 1, "host": HOSTILE, "host_memory": 10**10}
RUN = RunRecord(0, 2, 2, 1e9, 0, 10**6, 10**6, ["", "blocks.0", "blocks.1"], {"device": 10**6},
                CONFIG, ENVIRONMENT)  # fmt: skip
STEP = StepRecord(
    step=1,
    at=1e9,
    seconds=0.1,
    is_taken=True,
    why_skipped="",
    loss=2.0,
    grad_norm=1.0,
    loss_scale=1.0,
    lr=[0.1],
    micro_steps=1,
    samples=2,
    places={"forward": 0.03, "backward": 0.06, "step": 0.01},
    waits={"all_gather": 0.0, "reduce_scatter": 0.0, "ranks": 0.0},
    sent=[["all_gather", "parameters", 6, 1000, 0]],
    memory_bytes=10**9,
    peak_bytes=2 * 10**9,
)


def _write(folder, changes=None, *, num_ranks=2, end="failed", **of_run):
    """Write records of 20 steps, in which ``changes(rank, step)`` replaces fields of `STEP`."""
    ranks = {"world_size": num_ranks, "ranks_per_node": num_ranks}
    for rank in range(num_ranks):
        file = RecordFile(folder, rank, 1 << 20)
        file.write(replace(RUN, rank=rank, **ranks, **of_run))
        for step in range(1, 21):
            record = replace(STEP, step=step, **(changes(rank, step) if changes else {}))
            parts = sum(record.places.values()) + sum(record.waits.values())
            file.write(replace(record, seconds=parts or record.seconds))
        file.write(
            DetailRecord(
                20,
                1e9,
                [("compute", f"forward of {HOSTILE}", 0.0, 0.03, False)],
                [(0.0, 10**9, "outside"), (0.02, 2 * 10**9, HOSTILE)],
                {"parameters": 4 * 10**6, HOSTILE: 10},
            )
        )
        file.write(EventRecord(1e9, 20, end, HOSTILE))
        file.close()
    return folder


class _Tags(html.parser.HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_a_page_is_one_file_and_trusts_no_text(tmp_path: Path) -> None:
    """The page uses no other file or host, escapes the run's text, and is smaller than 2 MB."""
    run = _write(tmp_path / HOSTILE.replace("/", "_"), lambda rank, step: {"why_skipped": HOSTILE,
                 "is_taken": step != 5, "loss": math.nan if step == 5 else 2.0})  # fmt: skip
    page = write_report(run, tmp_path / "report.html")
    text = page.read_text(encoding="utf-8")
    assert len(text.encode()) < 2e6
    tags = _Tags(text).tags
    assert not [tag for tag, _ in tags if tag in ("img", "iframe", "object", "embed", "base")]
    assert [attrs["href"] for tag, attrs in tags if tag == "link"] == ["data:,"]
    outside = [v for _, a in tags for k, v in a.items() if k in ("src", "href") and v]
    assert all(value.startswith(("#", "data:,")) for value in outside)
    assert not [key for _, attrs in tags for key in attrs if key.startswith("on")]
    found = re.search(r'<script id="charts" type="application/json">(.*?)</script>', text, re.S)
    assert found is not None
    assert not set("<>&\u2028") & set(found[1])
    charts = json.loads(found[1])
    drawn = re.findall(r'data-chart="(\d+)"', text)
    assert list(map(int, drawn)) == list(range(len(charts)))


def test_a_start_that_loads_a_checkpoint_goes_on_from_its_step(tmp_path: Path) -> None:
    """The start is recorded before the checkpoint is loaded, so earlier steps belong to the run."""
    file = RecordFile(tmp_path, 0, 1 << 20)
    for first, last in ((0, 15), (10, 20)):
        file.write(replace(RUN, world_size=1))
        if first:
            file.write(EventRecord(1e9, first, "loaded", "checkpoint-10"))
        for step in range(first + 1, last + 1):
            file.write(replace(STEP, step=step, samples=first))
    file.write(replace(RUN, world_size=1, first_step=20))  # a start with no steps left
    file.close()
    (rank,) = read_run(tmp_path).ranks
    assert [start.first_step for start in rank.starts] == [0, 10, 20]
    assert rank.run.first_step == 10
    assert [step.step for step in rank.steps] == [*range(1, 21)]
    assert {step.samples for step in rank.steps if step.step > 10} == {10}
    assert "<td>resumed</td>" in write_report(tmp_path, tmp_path / "r.html").read_text(
        encoding="utf-8"
    )


def _straggler(rank: int, step: int) -> dict[str, Any]:
    own, wait = (0.12, 0.0) if rank == 1 else (0.06, 0.06)
    places = STEP.places | {"backward": own}
    return {"places": places, "waits": {"reduce_scatter": wait}}


def _link(*_: Any) -> dict[str, Any]:
    return {"waits": {"all_gather": 0.08, "reduce_scatter": 0.02}}


def _nonfinite(rank: int, step: int) -> dict[str, Any]:
    if step % 4:
        return {}
    return {"is_taken": False, "why_skipped": "blocks.0.weight: batch of rank 1"}


@pytest.mark.parametrize(
    ("changes", "words", "gain"),
    [
        (None, "Nothing stands out", None),
        (_straggler, r"straggler: rank 1 .* most of it in backward", 0.06 / 0.16),
        (_link, r"link between the ranks", 0.04 / 0.2),
        (_nonfinite, r"not finite in the batches of rank 1: 5 of 20 .* blocks\.0\.weight", 0.25),
        (
            lambda rank, _: {"places": STEP.places | {"outside": 0.05 * (rank == 0)}},
            r"the program outside of the engine: 50 ms of each step",
            0.05 / 0.15,
        ),
    ],
)
def test_the_first_sentence_names_the_cause_and_its_gain(tmp_path, changes, words, gain):
    sentence = first_sentence(read_run(_write(tmp_path, changes)))
    assert re.search(words, sentence), sentence
    if gain is not None:
        assert f"({-gain:+.0%})" in sentence, sentence


@pytest.mark.parametrize(
    ("threads", "cores", "num_ranks", "device", "scaling"),
    [
        (1, 2, 1, "cpu", 0.85 * 2),
        (2, 8, 2, "cpu", 0.85 * 2),
        (4, 8, 2, "cpu", None),
        (1, 8, 1, "cuda", None),
    ],
)
def test_threads_are_named_where_cores_are_free(
    tmp_path: Path, threads: int, cores: int, num_ranks: int, device: str, scaling: float | None
) -> None:
    """Computation is nine tenths of a step. Threads are predicted to shorten only this part."""
    environment = ENVIRONMENT | {"cores": cores, "threads": threads, "device": device}
    places = {"forward": 0.03, "backward": 0.05, "step": 0.01, "loader": 0.01}
    ranks = {"num_ranks": num_ranks, "environment": environment}
    _write(tmp_path, lambda *_: {"places": places}, **ranks)
    sentence = first_sentence(read_run(tmp_path))
    assert (f"compute with {cores // num_ranks} threads" in sentence) is (scaling is not None)
    if scaling is not None:
        assert f"({0.9 / scaling + 0.1 - 1:+.0%})" in sentence, sentence


def test_a_failed_run_says_which_rank_and_why(tmp_path: Path) -> None:
    for rank in range(2):
        file = RecordFile(tmp_path, rank, 1 << 20)
        file.write(replace(RUN, rank=rank))
        for step in (1, 2):
            file.write(replace(STEP, step=step))
        if rank == 1:
            file.write(EventRecord(1e9, 2, "failed", "ValueError: a broken batch"))
        file.close()
    run = read_run(tmp_path)
    assert run.failures == [
        "rank 1 failed after step 2: ValueError: a broken batch",
        "rank 0 left no end after step 2: it was killed",
    ]
    assert first_sentence(run).startswith("Rank 1 failed after step 2: ValueError: a broken batch.")
    (tmp_path / "steps-rank1.jsonl").unlink()
    run = read_run(tmp_path)
    assert (run.failures, run.absent) == ([], [1])


@pytest.mark.parametrize(
    ("error", "is_in_context", "end"),
    [
        (KeyError("seed"), True, ("failed", "KeyError: 'seed'")),
        (SystemExit(0), True, ("ended", "")),
        (RuntimeError("a\nb\n"), False, ("failed", "RuntimeError: a")),
    ],
)
def test_an_end_is_that_of_the_context_or_of_the_engine(error, is_in_context, end, tmp_path):
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    engine = zero_core.build(nn.Linear(2, 2), config)
    recording = engine.record(tmp_path)
    try:
        with recording if is_in_context else nullcontext():
            raise error
    except type(error):
        engine.close()
    found = read_run(tmp_path).ranks[0].end
    assert found is not None
    assert (found.what, found.text) == end


GPT = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2}
GPT |= {"vocab_size": 64, "n_positions": 16}


def _section(page: Path, title: str) -> str:
    text = page.read_text(encoding="utf-8")
    start = f"<h2>{title}</h2>" if title else '<section class="verdict [a-z]*">'
    found = re.search(rf"{start}(.*?)</section>", text, re.S)
    assert found is not None, title
    lines = re.sub(r"<[^>]+>", "\n", html.unescape(found[1])).splitlines()
    return "\n".join(line.strip() for line in lines if line.strip())


def test_a_page_has_a_move_for_each_cause(tmp_path: Path) -> None:
    page = write_report(_write(tmp_path / "run", _link, end="ended"), tmp_path / "page.html")
    title, evidence, *move = _section(page, "").splitlines()
    assert (title, evidence.split(":")[0]) == (_TITLES["link"], "The link between the ranks")
    assert {6, 7, 8} >= {len(each.split()) for each in _TITLES.values()}
    assert re.search(r"\S+ ms \u2192 \S+ ms an update \(-\d+%\)", move[1])
    assert json.loads("{" + "".join(move[2:-2]) + "}")["zero_optimization"]["stage"] == 2
    assert (move[-2], "Predicted from this run" in move[-1]) == ("Copy", True)
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "nvme"}}
    merged = _merged('"offload_optimizer": {"ratio": 0.5}', {"zero_optimization": zero})
    zero["offload_optimizer"]["ratio"] = 0.5
    assert json.loads("{" + merged + "}") == {"zero_optimization": zero}
    page = write_report(_write(tmp_path / "calm", end="ended"), tmp_path / "calm.html")
    assert re.match("Nothing stands out.*\nNo move", _section(page, "Next moves"))


def test_bytes_are_planned_beside_measured_ones(tmp_path: Path) -> None:
    config = {**CONFIG, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    shape = {"input_shape": [2, 16]}
    run = _write(tmp_path / "run", lambda *_: shape, model=GPT, config=config)
    page = write_report(run, tmp_path / "page.html")
    assert "no lane of copies: ranks compute on the host" in _section(page, "One step")
    assert "<dt>tokens a second</dt><dd>640</dd>" in page.read_text(encoding="utf-8")
    lines = _section(page, "Bytes sent").splitlines()
    assert lines[:4] == ["collective", "link", "planned", "measured"]
    assert re.match(r"all_gather: parameters\|within a node\|.* kB\|1 kB", "|".join(lines[4:]))


@pytest.mark.parametrize(
    "zero", [{}, {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}]
)
def test_records_of_an_engine_have_its_configuration(tmp_path: Path, zero: Any) -> None:
    """A plan accepts the recorded configuration. Recorded shares include the tier's padding."""

    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
    config |= {"optimizer": {"type": "AdamW"}, "step_records": {"folder": str(tmp_path)}}
    engine = zero_core.build(make_tower(), config)
    train(engine, [rows(number, 0) for number in range(3)])
    engine.close()
    found = read_run(tmp_path)
    effective = engine.config.model_copy(update={"step_records": None})
    assert load_config(found.settings, world_size=1) == effective
    share = found.run.shares["host"] / sum(found.run.shares.values())
    assert share == pytest.approx(0.5 if zero else 0.0, abs=0.2)
    assert first_sentence(found)
    planned = zero_core.plan(make_tower(), found.settings, 1, device_type="cpu").memory
    expected = Counter(planned.device) + Counter(planned.host)
    kept = kept_bytes(found.ranks[0])
    assert kept["optimizer states"] >= 8 * found.run.num_parameters
    for kind in ("parameters", "master weights", "optimizer states", "gradient copies"):
        assert kept[kind] == expected[kind], kind


@pytest.mark.parametrize("change", [{"config": {}}, {"rank": "<b>"}, {"world_size": 0}])
def test_a_start_with_a_wrong_field_is_one_error(tmp_path, change):
    _write(tmp_path, num_ranks=1)
    (file,) = tmp_path.glob("steps-rank*.jsonl")
    first, *others = file.read_text(encoding="utf-8").splitlines()
    file.write_text("\n".join([json.dumps(json.loads(first) | change), *others]), encoding="utf-8")
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert f"run.{next(iter(change))}" in result.stderr
