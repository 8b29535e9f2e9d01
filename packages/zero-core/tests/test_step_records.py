"""A recorded training leaves a line per step and rank, within bounds, and changes no number."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from zero_core.record import program
from zero_core.record.records import (
    FILE,
    DetailRecord,
    EventRecord,
    RecordFile,
    RunRecord,
    StepRecord,
    read_records,
    to_line,
)
from zero_core.testing import SimulatedRanks, seeded, simulate
from zero_core.watch.place import Place


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with seeded(1):
            self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x.square().mean()


def _config(stage: int = 3, **further: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        **further,
    }


def _step(engine: zero_core.Engine, x: Tensor) -> list[float]:
    losses = []
    for _ in range(2):
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _of(folder: Path, rank: int, kind: type[Any]) -> list[Any]:
    records = read_records(folder / FILE.format(rank=rank))
    return [record for record in records if isinstance(record, kind)]


def _train_two_ranks(ranks: SimulatedRanks, folder: Path, stage: int, is_recorded: bool) -> None:
    engine = zero_core.build(_Net(), _config(stage), process_group=ranks)
    if is_recorded:
        engine.record(folder, detail_every=2)
    losses = []
    for number in range(4):
        with seeded(10 * ranks.rank + number):
            x = torch.randn(2, 5)
        if ranks.rank == 1 and number == 2:
            x[0, 0] = math.nan
        losses += _step(engine, x)
    engine.close()
    torch.save((losses, list(engine.full_state_dict().values())), folder / f"{ranks.rank}.pt")


@pytest.mark.parametrize("stage", [0, 3])
def test_recording_changes_no_bit(tmp_path: Path, stage: int) -> None:
    """Losses and weights of two ranks, one step of them spoilt, are those without it."""
    found = []
    for name in ("plain", "recorded"):
        folder = tmp_path / name
        folder.mkdir()
        simulate(_train_two_ranks, 2, folder, stage, name == "recorded")
        found.append([torch.load(folder / f"{rank}.pt") for rank in range(2)])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0, equal_nan=True)
    for rank in range(2):
        steps = _of(tmp_path / "recorded", rank, StepRecord)
        losses, _ = found[1][rank]
        assert [s.step for s in steps] == [1, 2, 3, 4]
        assert [s.is_taken for s in steps] == [True, True, False, True]
        assert steps[2].why_skipped.startswith("blocks.")
        assert "batch of rank 1" in steps[2].why_skipped
        means = torch.tensor(losses).view(-1, 2).mean(1)
        torch.testing.assert_close(torch.tensor([s.loss for s in steps]), means, equal_nan=True)
        assert [s.micro_steps for s in steps] == [2] * 4


def test_times_of_places_and_waits_make_up_the_step(tmp_path: Path) -> None:
    """Nothing of a step is left out or counted twice, and steps follow each other."""
    engine = zero_core.build(_Net(), _config(step_records={"folder": str(tmp_path)}))
    for _ in range(4):
        _step(engine, torch.ones(2, 5))
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
    assert [e.what for e in _of(tmp_path, 0, EventRecord)] == ["ended"]


def test_a_file_stays_within_its_bound_and_keeps_the_whole_course(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, 0, max_bytes=20_000)
    record = StepRecord(1, 0.0, 0.1, True, "", math.nan, 1.0, 1.0, [0.1], 1, 2)
    for step in range(1, 2001):
        values = vars(record) | {"step": step}
        if step == 700:
            values |= {"is_taken": False, "why_skipped": "weight: batch of rank 1"}
        file.write(StepRecord(**values))
        assert file.path.stat().st_size <= 20_000 + 2 * len(to_line(record))
    file.close()
    steps = _of(tmp_path, 0, StepRecord)
    assert steps[0].step < 200
    assert steps[-1].step > 1800
    assert 700 in [s.step for s in steps]
    assert all(math.isnan(s.loss) for s in steps)


def test_a_line_cut_short_and_a_later_version(tmp_path: Path) -> None:
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


def test_samples_keep_nothing_of_the_program_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames hold tensors: what a function had is freed when it returns, by its own thread."""
    monkeypatch.setattr(program, "INTERVAL_S", 1e-4)
    sampler = program.ProgramSampler(Place())

    def work() -> weakref.ref[Tensor]:
        values = torch.ones(10)
        while not sampler.has_samples:
            sum(range(1000))
        return weakref.ref(values)

    kept = [work() for _ in range(20)]
    lines = sampler.take()
    sampler.close()
    assert [ref() for ref in kept] == [None] * 20
    assert any("sum(range(1000))" in line or "has_samples" in line for line in lines)
    assert not [t for t in threading.enumerate() if t.name == "zero_core samples"]


def test_a_report_needs_records(tmp_path: Path) -> None:
    engine = zero_core.build(_Net(), _config())
    with pytest.raises(zero_core.ConfigError, match=r"engine\.record"):
        engine.report(tmp_path / "page.html")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(zero_core.ConfigError, match="cannot be written"):
        engine.record(blocked)
    engine.close()
