"""Step records: their contents, the bound on their size, and files that fail or are damaged."""

import gc
import itertools
import json
import logging
import math
import os
import sys
import time
import weakref

import pytest
import torch
from support.full_disk import files_up_to

import zero_core
from zero_core.records import (
    FILE,
    DetailRecord,
    EventRecord,
    RecordFile,
    RunRecord,
    StepRecord,
    read_records,
    to_line,
)
from zero_core.testing import Case, make_tower, rows, simulate, train

RECORD = StepRecord(1, 0.0, 0.1, True, "", 1.0, 1.0, 1.0, [0.1], 1, 2)


def _build(stage=0, ranks=None, **top):
    return Case(stage, accumulation=2, top=top).build(ranks, make_tower(3))


def _step(engine, number=0):
    return train(engine, [rows(number, engine.rank)] * 2)


def _of(folder, rank, kind):
    records = read_records(folder / FILE.format(rank=rank))
    return [record for record in records if isinstance(record, kind)]


def test_each_rank_records_its_losses_its_waits_and_why_a_step_was_skipped(tmp_path):
    def program(ranks):
        engine = _build(3, ranks)
        engine.record(tmp_path, detail_every=2)
        losses = []
        for number in range(4):
            x = rows(number, ranks.rank)
            if ranks.rank == 1 and number == 2:
                x[0, 0] = math.nan
            if ranks.rank == 1 and number == 3:
                time.sleep(0.4)
            losses += train(engine, [x] * 2)
        engine.close()
        return losses

    waited = []
    for rank, losses in enumerate(simulate(program, 2)):
        steps = _of(tmp_path, rank, StepRecord)
        assert [s.step for s in steps] == [1, 2, 3, 4]
        assert [s.is_taken for s in steps] == [True, True, False, True]
        assert "batch of rank 1" in steps[2].why_skipped
        means = torch.tensor(losses).view(-1, 2).mean(1)
        torch.testing.assert_close(torch.tensor([s.loss for s in steps]), means, equal_nan=True)
        assert [s.micro_steps for s in steps] == [2] * 4
        waited.append(sum(steps[3].waits.values()))
    assert waited[0] - waited[1] > 0.2  # not 0.4, because a busy host also delays rank 0


def test_times_of_places_and_waits_make_up_the_step(tmp_path):
    engine = _build(3, step_records={"folder": str(tmp_path)})
    for _ in range(4):
        _step(engine)
    engine.close()
    (run,) = _of(tmp_path, 0, RunRecord)
    assert run.units == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert run.config["zero_optimization"]["stage"] == 3
    steps = _of(tmp_path, 0, StepRecord)
    for step in steps:
        parts = sum(step.places.values()) + sum(step.waits.values())
        assert parts == pytest.approx(step.seconds, abs=1e-5)
        assert {"forward", "backward", "step"} <= step.places.keys()
    for detail in _of(tmp_path, 0, DetailRecord):
        spans = [span for span in detail.spans if span[0] == "compute"]
        assert all(a[3] <= b[2] + 1e-6 for a, b in itertools.pairwise(spans))
        assert any(name.startswith("backward of unit 2") for _, _, name in detail.memory)
        seconds = next(step.seconds for step in steps if step.step == detail.step)
        assert detail.memory[0][0] == 0.0
        assert detail.memory[-1][0] == pytest.approx(seconds, abs=0.1)
        assert all(before[0] <= after[0] for before, after in itertools.pairwise(detail.memory))
    assert all(step.peak_bytes >= step.memory_bytes for step in steps)
    assert [e.what for e in _of(tmp_path, 0, EventRecord)] == ["ended"]


def test_a_file_stays_within_its_bound_and_keeps_the_whole_course(tmp_path):
    bound = 2**16
    file = RecordFile(tmp_path, 0, bound)
    spans = [("compute", "backward of unit 12 (blocks.11)", 0.1, 0.2, False)] * 300
    num_rewrites, inode = 0, file.path.stat().st_ino
    for step in range(1, 2001):
        values = vars(RECORD) | {"step": step, "loss": math.nan}
        if step == 700:
            values |= {"is_taken": False, "why_skipped": "weight: batch of rank 1"}
        file.write(StepRecord(**values))
        if step % 50 == 0:
            file.write(DetailRecord(step, 0.0, spans, []))
        found = file.path.stat()
        num_rewrites += found.st_ino != inode
        inode = found.st_ino
        assert found.st_size <= 1.5 * bound
    file.close()
    steps = _of(tmp_path, 0, StepRecord)
    assert len(steps) >= 20
    assert steps[0].step < 200
    assert steps[-1].step > 1800
    assert 700 in [s.step for s in steps]
    assert all(math.isnan(s.loss) for s in steps)
    assert len(_of(tmp_path, 0, DetailRecord)) == 1
    assert num_rewrites < 80


def test_a_file_that_cannot_be_written_ends_the_records_not_the_training(tmp_path, caplog):
    engine = _build()
    engine.record(tmp_path)
    _step(engine)
    size = (tmp_path / FILE.format(rank=0)).stat().st_size
    with files_up_to(size + 10):
        _step(engine)
    _step(engine)
    engine.close()
    assert engine.global_steps == 3
    assert [s.step for s in _of(tmp_path, 0, StepRecord)] == [1]
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "not recorded any more" in warning.getMessage()


def test_a_dropped_engine_leaves_nothing_of_its_records(tmp_path):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))

    def train():
        engine = _build()
        engine.record(tmp_path, detail_every=1)
        _step(engine)
        return weakref.ref(engine)

    engine = train()
    gc.collect()
    assert engine() is None
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("verb", ["backward", "plain", "idle"])
def test_samples_are_those_of_all_micro_steps(tmp_path, verb):
    engine = _build(step_records={"folder": str(tmp_path)})
    for number in range(4):
        if verb == "idle" and number % 2:
            engine.idle_step()
            continue
        loss = engine(rows(0, 0))
        if verb == "plain":
            (loss / 2).backward()
        else:
            engine.backward(loss)
        engine.step()
    engine.close()
    steps = _of(tmp_path, 0, StepRecord)
    assert [s.micro_steps for s in steps] == [2, 2]
    assert [s.samples for s in steps] == ([2, 2] if verb == "idle" else [4, 4])


def test_numbers_that_are_not_finite_are_json_at_any_depth(tmp_path):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    record = StepRecord(1, 0.0, 0.1, True, "", math.inf, None, 1.0, [math.nan], 1, 2)
    json.loads(to_line(record), parse_constant=refuse)
    (tmp_path / FILE.format(rank=0)).write_text(to_line(record) + "\n")
    (found,) = _of(tmp_path, 0, StepRecord)
    assert found.loss == math.inf
    assert math.isnan(found.lr[0])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seconds", "x"),
        ("seconds", "nan"),
        ("at", 1e300),
        ("step", 10**400),
        ("sent", [["all_gather"]]),
        ("places", {"forward": "<b>"}),
        ("samples", None),
    ],
)
def test_a_wrong_field_is_named(tmp_path, field, value):
    line = json.loads(to_line(RECORD)) | {field: value}
    path = tmp_path / FILE.format(rank=0)
    path.write_text("[" * 200_000 + "\n" + json.dumps(line))
    with pytest.raises(ValueError, match=rf"line 2: step\.{field}.* is "):
        read_records(path)


def test_records_are_read_of_a_regular_file_of_bounded_size(tmp_path):
    path = tmp_path / FILE.format(rank=0)
    os.mkfifo(path)
    with pytest.raises(ValueError, match="not a regular file"):
        read_records(path)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(2**30 + 1)
    with pytest.raises(ValueError, match="read up to 1073741824"):
        read_records(path)


def test_a_line_cut_short_and_a_later_version(tmp_path):
    file = RecordFile(tmp_path, 0, max_bytes=1 << 20)
    file.write(EventRecord(0.0, 1, "saved"))
    file.close()
    with file.path.open("a") as cut:
        cut.write('{"kind": "event", "ver')
    again = RecordFile(tmp_path, 0, max_bytes=1 << 20)
    again.write(EventRecord(0.0, 2, "loaded"))
    again.close()
    assert [e.what for e in _of(tmp_path, 0, EventRecord)] == ["saved", "loaded"]
    with file.path.open("a") as later:
        later.write('{"kind": "event", "version": 99}\n')
    with pytest.raises(ValueError, match="version 99"):
        read_records(file.path)


@pytest.mark.parametrize(
    ("error", "what", "text"),
    [(None, "ended", ""), (ValueError("no data"), "failed", "ValueError: no data")],
)
def test_end_of_a_program_that_closes_no_engine_is_recorded(
    tmp_path, monkeypatch, error, what, text
):
    engine = _build()
    engine.record(tmp_path)
    _step(engine)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    del engine
    gc.collect()
    (event,) = _of(tmp_path, 0, EventRecord)
    assert (event.step, event.what, event.text) == (1, what, text)


def test_a_report_needs_records(tmp_path):
    engine = _build()
    with pytest.raises(zero_core.ConfigError, match=r"engine\.record"):
        engine.report(tmp_path / "page.html")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(zero_core.ConfigError, match="cannot be written"):
        engine.record(blocked)
    engine.close()
