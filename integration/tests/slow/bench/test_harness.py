"""Rank processes, rounds, reports and models of the benchmarks."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness import memory, ranks, rounds
from benchmarks.harness.forked_python import forked_python
from benchmarks.harness.job import Job
from benchmarks.harness.memory import GIB, HostWatch, limit_device
from benchmarks.harness.models import Gpt, GptShape, GptWithCheckpoints, GptWithSmallLogits
from benchmarks.harness.ranks import RankError, Row, Runner, run_ranks
from benchmarks.harness.report import Column, Section, markdown
from benchmarks.harness.rounds import race_on_cpu, race_on_device, take_turns
from benchmarks.harness.tracing import busy_seconds, summary, trace

SHAPE = GptShape(layers=2, width=32, heads=2, vocab=50, context=12)
JOB = Job("tiny", "zero", SHAPE, micro_batch=2, steps=1, warmup=0, dtype="bf16")
CPU = torch.device("cpu")


def test_failing_contender_is_a_row_with_its_error_and_is_not_tried_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (row,) = race_on_cpu([replace(JOB, stage=7)], 3, Runner()).values()
    assert set(row) == {"failure", "log"}
    assert "zero_optimization.stage" in row["failure"]
    assert "Traceback" in row["log"]
    assert capsys.readouterr().out == "0 M parameters, 1 ranks\nround 1/3: tiny\n"


def test_ranks_are_ended_after_their_time() -> None:
    with pytest.raises(RankError, match="ended after 0 s"):
        run_ranks("tests_of_nothing:any", {}, limit_s=0.0)
    late = {"skipped": "the time limit of 0 s is over"}
    assert Runner(0.0).start("any:any", {}) == [late]


def test_contender_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds.importlib.util, "find_spec", lambda _: None)
    peer = replace(JOB, name="peer", side="deepspeed")
    found = race_on_device([peer], 2, Runner(60.0))
    assert found == {"peer": {"failure": "deepspeed is not installed: pip install deepspeed"}}
    assert rounds.missing("ddp") == ""


def test_contenders_take_turns_and_medians_are_over_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speeds = iter([1.0, 2.0, 3.0, 4.0, 5.0, 9.0])
    order: list[tuple[str, int]] = []

    def start(job: Job, _: Runner) -> Row:
        order.append((job.name, job.num_traced))
        speed = next(speeds)
        return {"step_s": 1 / speed, "tokens_per_s": speed, "losses": [speed]}

    monkeypatch.setattr(rounds, "start_on_device", start)
    jobs = [replace(JOB, name=name, num_traced=2) for name in "ab"]
    found = race_on_device(jobs, 3, Runner(60.0))
    assert order == [("a", 2), ("b", 2), ("a", 0), ("b", 0), ("a", 0), ("b", 0)]
    assert found["a"]["tokens_per_s"] == 3.0
    assert found["b"]["tokens_per_s"] == 4.0
    assert found["b"]["losses"] == [2.0]  # of the first round
    assert found["a"]["steps_s"] == [1.0, 1 / 3, 1 / 5]


def test_rounds_on_the_cpu_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([2.0, 4.0])

    def start(_: Job, __: Runner) -> Row:
        seconds = next(found)
        rank = {"times_s": [seconds, 9.0], "added_bytes": int(seconds) * 2**20}
        rank |= {"losses": [9.0, seconds], "counted": {"io_s": seconds}}
        rank |= {"shard_bytes": {"file": 8 * int(seconds)}}
        return {"ranks": [rank, {**rank, "times_s": []}]}

    monkeypatch.setattr(rounds, "start_on_cpu", start)
    row = race_on_cpu([JOB], 2, Runner())["tiny"]
    assert row["times_s"] == [2.0, 9.0, 4.0, 9.0]
    assert (row["median_s"], row["min_s"], row["added_mib_per_rank"]) == (6.5, 2.0, 3.0)
    assert (row["last_loss"], row["counted"]) == (4.0, {"io_s": 12.0})
    assert row["shard_bytes"] == {"file": 16}  # of rank 0 in the first round


def test_contender_without_figures_is_not_run_again() -> None:
    order: list[tuple[str, int]] = []

    def run(name: str, number: int) -> Row:
        order.append((name, number))
        return {"skipped": "no time"} if name == "a" else {"step_s": 1.0}

    take_turns("ab", 2, run)
    assert order == [("a", 0), ("b", 0), ("b", 1)]


def test_table_has_the_rows_with_figures_and_reasons_the_others() -> None:
    rows: dict[str, Row] = {
        "a": {"s": 0.0125, "is_met": False, "share": None},
        "b": {"failure": "no memory"},
        "c": {"s": 1.0, "is_met": None, "share": 0.5},
    }
    columns = (
        Column("ms", "s", ".1f", 1e-3),
        Column("share", "share", ".0%"),
        Column("bar", "is_met"),
        Column("twice", lambda row: 2 * row["s"], "g"),
    )
    section = Section("t", rows, columns, "c")
    assert markdown(section.table) == (
        "|  | ms | share | bar | twice |\n"
        "| --- | ---: | ---: | ---: | ---: |\n"
        "| a | 12.5 |  | missed | 0.025 |\n"
        "| c | 1000.0 | 50% |  | 2 |\n"
    )
    assert list(section.reasons()) == ["b: failure: no memory"]


def test_models_of_both_kinds_have_the_size_of_their_shape() -> None:
    for name in ("plain", "gpt2"):
        job = replace(JOB, model=name)
        model = job.meta_model()
        assert sum(p.numel() for p in model.parameters()) == SHAPE.numel
        assert len(model.blocks) == SHAPE.layers


def test_old_command_names_the_new_one_and_runs_it() -> None:
    done = subprocess.run(
        [forked_python(), "-m", "zero_engine.bench.gpu.document", "--help"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "run.py document" in done.stdout
    assert "DeprecationWarning: zero_engine.bench will be removed" in done.stderr


def test_programs_for_accelerators_need_no_library_beyond_torch_and_this_project() -> None:
    text = (
        "import sys; sys.modules['transformers'] = sys.modules['deepspeed'] = None\n"
        "import benchmarks.experiments.gpu.program, benchmarks.experiments.gpu.offload\n"
        "import benchmarks.experiments.comm_cuda, benchmarks.harness.train"
    )
    environment = ranks.own_environment()
    subprocess.run([sys.executable, "-c", text], check=True, timeout=600, env=environment)


@pytest.mark.parametrize("model_class", [GptWithCheckpoints, GptWithSmallLogits])
def test_lean_model_gives_the_loss_and_gradients_of_the_plain_one(model_class: type[Gpt]) -> None:
    plain, lean = Gpt(SHAPE).double(), model_class(SHAPE).double()
    lean.load_state_dict(plain.state_dict())
    ids = torch.randint(SHAPE.vocab, (3, SHAPE.context), generator=torch.Generator().manual_seed(0))
    losses = [model(ids) for model in (plain, lean)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0])
    for mine, theirs in zip(lean.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-7)
    assert SHAPE.numel == sum(p.numel() for p in plain.parameters())


def event(name: str, start: float, duration: float, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}


def test_summary_of_a_trace_is_per_step_and_over_all_streams() -> None:
    events = [
        event("gemm", 100.0, 50.0),
        event("adam", 120.0, 10.0),  # within the first, on another stream
        event("gemm", 140.0, 30.0),  # overlaps its end by 10
        event("norm" * 50, 400.0, 5.0),
        event("Memcpy DtoH (Device -> Pinned)", 200.0, 100.0, "gpu_memcpy"),
        event("Memcpy HtoD (Pinned -> Device)", 210.0, 40.0, "gpu_memcpy"),
        event("Memcpy HtoD (Pinned -> Device)", 240.0, 20.0, "gpu_memcpy"),
        event("aten::mm", 0.0, 1000.0, "cpu_op"),
        {"ph": "M", "name": "process_name"},
    ]
    found = summary(events, 2)
    assert found is not None
    kernels = found.pop("kernels")
    expected = {"busy_s": 75e-6, "d2h_s": 100e-6, "h2d_s": 50e-6, "num_kernels": 4}
    assert found == pytest.approx({name: value / 2 for name, value in expected.items()})
    assert [kernel["name"] for kernel in kernels] == ["gemm", "adam", "norm" * 25]
    assert kernels[0] == {"name": "gemm", "s": pytest.approx(40e-6), "calls": 1.0}
    assert summary(events[-2:], 2) is None
    assert busy_seconds([]) == 0.0


def test_trace_of_the_cpu_is_kept_without_figures_of_a_device(tmp_path: Path) -> None:
    calls: list[torch.Tensor] = []
    assert trace(lambda: calls.append(torch.ones(3).sum()), 2, CPU) is None
    assert calls == []
    file = tmp_path / "new" / "t.json.gz"
    assert trace(lambda: calls.append(torch.ones(3).sum()), 2, CPU, keep=str(file)) is None
    assert len(calls) == 2
    with gzip.open(file, "rt") as opened:
        names = [e.get("name") for e in json.load(opened)["traceEvents"]]
    assert "aten::sum" in names
    (tmp_path / "file").write_text("")
    failed = trace(lambda: None, 1, CPU, keep=str(tmp_path / "file" / "t.json.gz"))
    assert failed is not None
    assert "file" in failed["failure"]


def test_host_peak_is_the_largest_drop_of_available_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    available = iter([1000, 900, 300, 700])
    last = [0]

    def read() -> int:
        last[0] = next(available, last[0])
        return last[0]

    monkeypatch.setattr(memory, "machine_available_bytes", read)
    monkeypatch.setattr(memory, "INTERVAL_S", 1e-3)
    watch = HostWatch()
    deadline = time.monotonic() + 120
    while last[0] != 700 and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert watch.stop() == 700


class _Limited:
    """A device's module that records its limit."""

    fraction = 0.0

    @classmethod
    def set_per_process_memory_fraction(cls, fraction: float, device: torch.device) -> None:
        cls.fraction = fraction


def test_device_limit_is_a_fraction_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch, "get_device_module", lambda _: _Limited)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (60 * GIB, 80 * GIB))
    assert limit_device(32 * GIB, device) == 32 * GIB
    assert _Limited.fraction == pytest.approx(0.4)
    with pytest.raises(RuntimeError, match="less than the limit"):
        limit_device(96 * GIB, device)
    monkeypatch.setattr(torch, "get_device_module", lambda _: object())
    with pytest.raises(RuntimeError, match="cannot be limited"):
        limit_device(32 * GIB, device)
    assert limit_device(32 * GIB, CPU) is None
