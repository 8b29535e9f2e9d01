"""The accelerator benchmark runs from end to end on the CPU, and what it computes is right."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from zero_engine.bench.gpt import Gpt, GptShape, GptWithSmallLogits
from zero_engine.bench.offload_cuda import capacity as large
from zero_engine.bench.offload_cuda import host_memory, rank
from zero_engine.bench.offload_cuda import speed as racing
from zero_engine.bench.offload_cuda.jobs import Clock, Job, Runner
from zero_engine.bench.offload_cuda.settings import DRY, GIB, REAL
from zero_engine.bench.offload_cuda.timeline import bounds
from zero_engine.bench.offload_cuda.tracing import busy_seconds, summary, trace

RATIOS = ("ratio 0.6",)
SHAPE = GptShape(layers=2, width=32, heads=2, vocab=50, context=12)


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zero_engine.bench.offload_cuda", "--dry-run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run of speed, and what it printed; test_gpu_bench.py has the other parts."""
    folder = tmp_path_factory.mktemp("offload_cuda")
    contenders = [f"--contender={name}" for name in RATIOS]
    done = run_program("--only=speed", *contenders, f"--output={folder}")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


@pytest.fixture(scope="module")
def parts(dry_run: tuple[Path, str]) -> Any:
    return json.loads((dry_run[0] / "offload_cuda.json").read_text())["parts"]


def test_dry_run_writes_a_picture_and_prints_a_table_last(dry_run: tuple[Path, str]) -> None:
    folder, said = dry_run
    assert (folder / "offload_cuda.png").stat().st_size > 0
    after = said.partition("written to")[2]
    assert all(name in after for name in ("speed", *RATIOS))


def test_bytes_over_the_bus_follow_the_ratio(parts: Any) -> None:
    for name, row in parts["speed"]["rows"].items():
        if name in RATIOS:
            ratio = float(name.removeprefix("ratio "))
            assert row["host_share"] == pytest.approx(ratio, abs=1e-4)
            moved = 2 * ratio * row["num_parameters"]  # 16 bits each, once down and once up
            expected = {"bytes_d2h": moved, "bytes_h2d": moved}
            assert row["moved_bytes"] == pytest.approx(expected, rel=1e-3)


def test_spread_of_losses_is_the_largest_at_any_step() -> None:
    losses = {"ratio 1.0": [4.0, 2.0, 9.0], "ratio 0.6": [4.0, 2.1], "fsdp2": [8.0, 8.0]}
    rows: dict[str, Any] = {name: {"step_s": 1, "losses": row} for name, row in losses.items()}
    rows["ratio auto"] = {"failure": "no"}
    assert racing._loss_spread(rows) == pytest.approx(0.05)
    assert racing._loss_spread({}) is None


def test_every_row_has_figures_or_says_why_not(parts: Any) -> None:
    for part in parts.values():
        for name, row in part["rows"].items():
            has_figures = "step_s" in row
            assert has_figures or row.get("failure") or row.get("skipped"), name


def test_parts_after_the_time_limit_are_skipped_and_named(tmp_path: Path) -> None:
    done = run_program("--time-limit=0", f"--output={tmp_path}")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "offload_cuda.json").read_text())
    assert report["parts"] == {}
    assert report["skipped"] == [
        f"{part}: the time limit of 0 s is over" for part in ("speed", "timeline", "capacity")
    ]
    assert "capacity: the time limit" in done.stdout


def test_job_after_the_time_limit_is_a_row_that_says_so() -> None:
    job = racing.speed_jobs(DRY)[0]
    assert Runner(Clock(0.0), device_type="cpu").run(job) == {
        "skipped": "the time limit of 0 s is over"
    }


def test_job_that_fails_is_a_row_with_its_failure() -> None:
    job = Job(
        name="wrong",
        side="zero",
        shape=SHAPE,
        micro_batch=1,
        steps=1,
        warmup=0,
        offload={"ratio": 1.5},
    )
    row = Runner(Clock(120.0), device_type="cpu").run(job)
    assert set(row) == {"failure", "log"}
    assert "Traceback" in row["log"]
    assert "offload_optimizer.ratio" in row["failure"]


def test_side_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    jobs = [job for job in racing.speed_jobs(DRY) if job.name == "deepspeed-3 ratio 0.4"]
    runner = Runner(Clock(60.0), device_type="cpu")
    found = racing.speed(jobs, DRY, runner, Console(quiet=True))
    assert found["rows"] == {
        "deepspeed-3 ratio 0.4": {"failure": "deepspeed is not installed: pip install deepspeed"}
    }


def test_model_that_the_host_cannot_hold_is_skipped_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(large, "available_bytes", lambda: 2 * GIB)
    jobs = [job for job in large.capacity_jobs(REAL) if job.name == "tutorial, bf16"]
    runner = Runner(Clock(60.0), device_type="cpu")
    found = large.capacity(jobs, REAL, runner, Console(quiet=True))
    row = found["rows"]["tutorial, bf16"]
    assert row["planned_host_bytes"] > 12 * 10e9
    needed = row["planned_host_bytes"] / GIB
    expected = f"needs {needed:.1f} GiB of host memory, 2.0 are available"
    assert row["skipped"] == expected


def test_sizes_are_those_of_the_tutorial() -> None:
    assert (REAL.tutorial.layers, REAL.tutorial.width, REAL.large_batch) == (50, 4096, 10)
    assert REAL.tutorial.numel / 1e9 == pytest.approx(10.3, abs=0.1)
    assert REAL.wide.numel / 1e9 == pytest.approx(12.9, abs=0.1)
    with torch.device("meta"):
        model = Gpt(REAL.shape)
    assert REAL.shape.numel == sum(p.numel() for p in model.parameters())


def test_small_logits_give_the_loss_and_the_gradients_of_large_ones() -> None:
    plain, small = Gpt(SHAPE).double(), GptWithSmallLogits(SHAPE).double()
    small.load_state_dict(plain.state_dict())
    ids = torch.randint(SHAPE.vocab, (3, SHAPE.context), generator=torch.Generator().manual_seed(0))
    # The loss itself is fp32, as in training.
    losses = [model(ids) for model in (plain, small)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0])
    for mine, theirs in zip(small.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-7)


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


def test_trace_of_the_cpu_is_kept_and_tells_nothing_of_a_device(tmp_path: Path) -> None:
    cpu, calls = torch.device("cpu"), []
    assert trace(lambda: calls.append(torch.ones(3).sum()), 2, cpu) is None
    assert calls == []
    file = tmp_path / "new" / "t.json.gz"
    assert trace(lambda: calls.append(torch.ones(3).sum()), 2, cpu, keep=str(file)) is None
    assert len(calls) == 2
    with gzip.open(file, "rt") as opened:
        names = [e.get("name") for e in json.load(opened)["traceEvents"]]
    assert "aten::sum" in names


def test_trace_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = trace(lambda: None, 1, torch.device("cpu"), keep=str(tmp_path / "file" / "t.json.gz"))
    assert found is not None
    assert "file" in found["failure"]


@pytest.mark.parametrize(
    ("busy_s", "bound", "bound_s"), [(0.5, "device", 0.5), (0.3, "bus", 0.4), (0.1, "bus", 0.4)]
)
def test_step_is_held_against_the_slowest_of_device_bus_and_host(
    busy_s: float, bound: str, bound_s: float
) -> None:
    row = {
        "step_s": 0.46,
        "device_busy_s": busy_s,
        "host_share": 0.5,
        "num_parameters": 2 * 10**9,
        "moved_bytes": {"bytes_d2h": 2 * 10**9, "bytes_h2d": 4 * 10**9},
    }
    bandwidth = {"host": 100e9, "pinned": {"d2h": 20e9, "h2d": 10e9}}
    found = bounds(row, bandwidth)
    assert found["bus_s"] == pytest.approx(0.4)  # up, the slower way
    assert found["host_s"] == pytest.approx(0.28)  # 10^9 elements x 28 B
    assert found["bound"] == bound
    assert found["step_to_bound"] == pytest.approx(0.46 / bound_s)
    assert found["is_met"] == (0.46 / bound_s <= 1.15)
    assert found["device_idle_s"] == pytest.approx(max(0.0, 0.46 - busy_s))


def test_host_peak_is_the_largest_drop_of_what_is_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    available = iter([1000, 900, 300, 700])
    last = [0]

    def tell(_: str) -> int:
        last[0] = next(available, last[0])
        return last[0]

    monkeypatch.setattr(host_memory, "_meminfo", tell)
    monkeypatch.setattr(host_memory, "INTERVAL_S", 1e-3)
    watch = host_memory.HostWatch()
    deadline = time.monotonic() + 10
    while last[0] != 700 and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert watch.stop() == 700


class _Limited:
    """A device's module that remembers what it was limited to."""

    fraction = 0.0

    @classmethod
    def set_per_process_memory_fraction(cls, fraction: float, device: torch.device) -> None:
        cls.fraction = fraction


def test_device_limit_is_a_fraction_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch, "get_device_module", lambda _: _Limited)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (60 * GIB, 80 * GIB))
    assert rank._limit_device(32 * GIB, device) == 32 * GIB
    assert _Limited.fraction == pytest.approx(0.4)
    with pytest.raises(RuntimeError, match="less than the limit"):
        rank._limit_device(96 * GIB, device)
    monkeypatch.setattr(torch, "get_device_module", lambda _: object())
    with pytest.raises(RuntimeError, match="cannot be limited"):
        rank._limit_device(32 * GIB, device)
    assert rank._limit_device(32 * GIB, torch.device("cpu")) is None


def test_program_needs_no_library_beyond_torch_and_this_project() -> None:
    text = (
        "import sys; sys.modules['transformers'] = sys.modules['deepspeed'] = None\n"
        "import zero_engine.bench.offload_cuda.__main__, zero_engine.bench.offload_cuda.rank"
    )
    subprocess.run([sys.executable, "-c", text], check=True, timeout=600)


def test_without_an_accelerator_the_program_says_what_to_do(tmp_path: Path) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    command = [sys.executable, "-m", "zero_engine.bench.offload_cuda", f"--output={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2
    assert "--dry-run" in done.stderr
