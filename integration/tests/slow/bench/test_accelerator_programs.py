"""The programs for accelerators run whole on the CPU, and their figures agree."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner, Result

from benchmarks.__main__ import command
from benchmarks.experiments.gpu import capacity, in_memory, program
from benchmarks.experiments.gpu.bounds import bounds, with_idle
from benchmarks.experiments.gpu.capacity import capacity_jobs, with_plan
from benchmarks.experiments.gpu.correct import groups
from benchmarks.experiments.gpu.correct.delays import delayed
from benchmarks.experiments.gpu.part import Context
from benchmarks.experiments.gpu.program import PARTS
from benchmarks.experiments.gpu.results import Results, document, provenance
from benchmarks.experiments.gpu.speed import loss_spread, verdicts
from benchmarks.harness.job import DRY_SHAPE, Job
from benchmarks.harness.memory import GIB
from benchmarks.harness.models import GptShape
from benchmarks.harness.ranks import Place, Runner
from benchmarks.harness.sides import SIDES

pytestmark = pytest.mark.usefixtures("forked_ranks")
ROOT = Path(__file__).parents[4]
MEASURED = ("correct", "twin_flow_1b", "roofline", "largest", "single", "quantizers")
SHAPE = GptShape(layers=2, width=32, heads=2, vocab=50, context=12)


def run(name: str, *arguments: str) -> Result:
    return CliRunner().invoke(command(name), ["--dry-run", *arguments])


@pytest.fixture(scope="module")
def dry_run(forked_ranks: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run of most parts, and its output."""
    folder = tmp_path_factory.mktemp("gpu")
    names = [f"--only={name}" for name in MEASURED]
    said = _measure(folder, *names[:-1])
    with pytest.MonkeyPatch.context() as patch:
        # Triton reads as it is imported that it interprets: not in a fork of what has imported it.
        patch.setattr(sys, "executable", forked_ranks)
        return folder, said + _measure(folder, names[-1])


def _measure(folder: Path, *names: str) -> str:
    done = run("gpu", "--minutes=60", *names, f"--out={folder}")
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def parts(dry_run: tuple[Path, str]) -> Any:
    return json.loads((dry_run[0] / "gpu.json").read_text())["parts"]


def test_dry_run_writes_a_picture_and_prints_short_tables_last(dry_run: tuple[Path, str]) -> None:
    folder, said = dry_run
    assert (folder / "gpu.png").stat().st_size > 0
    traces = {str(path.relative_to(folder / "traces")) for path in folder.glob("traces/*/*")}
    names = ("roofline/ratio 0.6", "single/bf16: stage 3", "single/bf16: torch")
    assert traces == {f"{name}.json.gz" for name in names}
    after = said.partition("written to")[2]
    for words in ("correct", "tokens per second", "bounds", "large models", "kernels", "stage 3"):
        assert words in after, words
    assert len(after.splitlines()) < 120


def test_every_row_has_figures(parts: Any) -> None:
    assert list(parts) == list(MEASURED)
    for part in parts.values():
        for name, row in part["rows"].items():
            assert not {"failure", "skipped"} & set(row), (name, row)


def test_each_part_says_when_and_of_what(parts: Any) -> None:
    for part in parts.values():
        measured = part["measured"]
        assert measured["is_dry_run"] is True
        assert measured["device"] == "CPU"
        assert measured["versions"]["torch"]
        assert measured["date"].startswith("20")


def test_all_cases_are_correct_on_the_cpu_and_the_planted_race_is_seen(parts: Any) -> None:
    rows = parts["correct"]["rows"]
    missed = {name: row for name, row in rows.items() if row["is_met"] is not True}
    assert missed == {}
    late = [row["num_late"] for name, row in rows.items() if "num_late" in row]
    assert min(late) > 10
    assert rows["delays: a planted race of threads"]["found"] == 1
    assert rows["comm 2: qgZ"]["found"] > 0  # something was quantized
    assert {name.partition(":")[0] for name in rows} == {"offload 2", "delays", "comm 2"}


def test_host_kernel_is_as_near_to_torchs_as_rounding() -> None:
    (row,) = groups.host_kernel(torch.device("cpu")).values()
    assert row["is_met"] is True
    assert 0 <= row["found"] <= row["bar"]


def test_ratio_and_fsdp2_train_much_the_same_numbers(parts: Any) -> None:
    rows = parts["twin_flow_1b"]["rows"]
    ours, theirs = rows["batch 2, ratio 0.4"], rows["batch 2, fsdp2"]["losses"]
    assert theirs == pytest.approx(ours["losses"][: len(theirs)], rel=1e-3)
    assert ours["host_share"] == pytest.approx(0.4, abs=1e-3)
    moved = 2 * 0.4 * ours["num_parameters"]  # 16 bits each, once down and once up
    expected = {"bytes_d2h": moved, "bytes_h2d": moved}
    assert ours["moved_bytes"] == pytest.approx(expected, rel=1e-2)
    found = parts["twin_flow_1b"]["verdicts"]["batch 2"]
    assert found["best ratio to best peer"]["found"] > 0
    assert found["best ratio to best peer"]["is_met"] is None  # of a CPU it says nothing


def test_roofline_is_null_where_only_an_accelerator_tells(parts: Any) -> None:
    bandwidth = parts["roofline"]["bandwidth_bytes_per_s"]
    assert bandwidth["pinned"] is None
    assert 1e8 < bandwidth["host"] < 1e13
    row = parts["roofline"]["rows"]["ratio 0.6"]
    numel = row["host_share"] * row["num_parameters"]
    assert row["host_s"] == pytest.approx(28 * numel / bandwidth["host"])
    assert row["why_null"] == "not measured on this device: device, bus"
    for key in ("device_busy_s", "device_idle_s", "bus_s", "bound", "step_to_bound", "is_met"):
        assert row[key] is None


def test_large_model_is_planned_and_learns(parts: Any) -> None:
    row = parts["largest"]["rows"]["wide, bf16, int8 states"]
    assert row["losses"][-1] < row["losses"][0]
    assert row["is_falling"] is True
    assert row["skipped_steps"] == 0
    assert row["planned_peak_bytes"] > row["planned_device_bytes"]  # activations
    assert row["peak_to_plan"] is None
    assert row["is_met"] is True  # within the host's limit; the device has none


def test_stage_3_trains_much_the_same_numbers_as_torch(parts: Any) -> None:
    rows = parts["single"]["rows"]
    expected = pytest.approx(rows["bf16: stage 3"]["losses"], rel=2e-3)
    assert rows["bf16: torch"]["losses"] == expected
    speed = rows["bf16: stage 3"]["tokens_per_s"]
    ratio = speed / rows["bf16: torch"]["tokens_per_s"]
    assert rows["bf16: stage 3"]["to_torch"] == pytest.approx(ratio)


def test_masters_by_hand_are_the_engines_numbers_and_weights_without_are_not(
    tmp_path: Path,
) -> None:
    job = Job("any", "any", SHAPE, micro_batch=2, steps=0, warmup=0, dtype="bf16")
    job = job.unchecked()
    device = torch.device("cpu")
    batches = [next(job.batches(0))] * 3
    losses = {}
    for side in ("zero", "torch_masters", "torch_low", "torch", "fsdp2"):
        step = SIDES[side](job, device, Place(0, 1, tmp_path)).step
        losses[side] = [float(step(ids)) for ids in batches]
    dist.destroy_process_group()  # FSDP2's
    assert losses["torch_masters"] == losses["zero"]
    assert losses["torch_low"] != losses["zero"]
    for side in ("torch_low", "torch", "fsdp2"):
        assert losses[side] == pytest.approx(losses["zero"], rel=5e-3)


def test_a_later_run_keeps_the_other_parts(dry_run: tuple[Path, str], tmp_path: Path) -> None:
    before = json.loads((dry_run[0] / "gpu.json").read_text())
    (tmp_path / "gpu.json").write_text(json.dumps(before))
    done = run("gpu", "--only=fragmentation", f"--out={tmp_path}")
    assert done.exit_code == 0, done.output
    after = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert list(after) == [*MEASURED, "fragmentation"]
    assert {name: after[name] for name in MEASURED} == before["parts"]
    rows = after["fragmentation"]["rows"]
    assert list(rows) == ["stage 3"]
    for row in rows.values():
        assert row["tokens_per_s"] > 0
        assert row["is_met"] is None
        assert "does not tell" in row["why_null"]


def test_time_that_is_over_skips_what_is_left_and_says_so(tmp_path: Path) -> None:
    done = run("gpu", "--minutes=0", "--only=single", f"--out={tmp_path}")
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "gpu.json").read_text())["parts"]["single"]["rows"]
    assert {row["skipped"] for row in rows.values()} == {"the time limit of 0 s is over"}
    assert "single: bf16: torch: skipped: the time limit" in done.stdout
    assert not (tmp_path / "gpu.png").exists()


def test_unknown_part_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    done = run("gpu", "--only=speed", f"--out={tmp_path}")
    assert done.exit_code == 2
    assert "unknown 'speed'" in done.stderr
    assert all(name in done.stderr for name in PARTS)


def test_part_without_figures_leaves_those_of_an_earlier_run(tmp_path: Path) -> None:
    results = Results(tmp_path)
    measured = {"is_dry_run": False}
    assert results.add("single", {"rows": {"a": {"step_s": 1.0}}}, measured)
    assert not results.add("single", {"rows": {"a": {"skipped": "no time"}}}, measured)
    assert Results(tmp_path).parts["single"]["rows"] == {"a": {"step_s": 1.0}}
    done = run("gpu", "--minutes=0", "--only=single", f"--out={tmp_path}")
    assert done.exit_code == 2
    assert "figures of an accelerator for single" in " ".join(done.output.replace("│", "").split())


def test_part_that_raises_is_a_row_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(_: Context) -> dict[str, Any]:
        raise RuntimeError("no such device")

    monkeypatch.setitem(program.PARTS, "single", replace(PARTS["single"], run=fail))
    chosen = ("--only=single", "--only=fragmentation")
    done = run("gpu", "--minutes=0", *chosen, f"--out={tmp_path}")
    assert done.exit_code == 0, done.output
    found = Results(tmp_path).parts
    assert found["single"]["rows"] == {"all": {"failure": "RuntimeError: no such device"}}
    assert "skipped" in found["fragmentation"]["rows"]["stage 3"]


def test_figures_of_an_accelerator_need_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZERO_ENGINE_COMMIT", raising=False)
    monkeypatch.setenv("PATH", "")  # no git
    with pytest.raises(ValueError, match="set ZERO_ENGINE_COMMIT"):
        provenance(torch.device("cuda"), is_dry_run=False)
    monkeypatch.setenv("ZERO_ENGINE_COMMIT", "0123abc")
    assert provenance(torch.device("cuda"), is_dry_run=False)["commit"] == "0123abc"


def test_file_of_another_program_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match="move it away"):
        Results(tmp_path)
    assert (tmp_path / "gpu.json").read_text() == "[1, 2]"


def test_verdicts_take_the_best_peer_and_the_best_fixed_ratio() -> None:
    speeds = {"ratio 1.0": 100.0, "ratio 0.4": 330.0, "ratio auto": 300.0}
    speeds |= {"fsdp2": 40.0, "fsdp2, units kept": 41.0, "deepspeed-2": 55.0, "deepspeed-3": 20.0}
    rows: dict[str, Any] = {name: {"tokens_per_s": speed} for name, speed in speeds.items()}
    rows["deepspeed-3 ratio 0.4"] = {"tokens_per_s": 500.0}  # not all of it offloaded
    rows["ratio 0.0"] = {"failure": "out of memory"}
    found = verdicts(rows)
    assert found["ratio 1 to best peer"]["found"] == pytest.approx(100 / 55)
    assert found["ratio 1 to best peer"]["is_met"] is False
    best = {"found": 6.0, "bar": 6.0, "is_met": True, "untried": []}
    assert found["best ratio to best peer"] == best
    assert found["auto to best ratio"]["is_met"] is False
    assert verdicts({})["auto to best ratio"]["found"] is None


@pytest.mark.parametrize(
    ("name", "row"), [("deepspeed-2", {"failure": "no"}), ("ratio 0.4", {"skipped": "no time"})]
)
def test_verdict_waits_for_everyone_it_names(name: str, row: dict[str, str]) -> None:
    names = ("ratio 1.0", "ratio 0.4", "ratio auto", "fsdp2", "fsdp2, units kept")
    rows: dict[str, Any] = {
        n: {"tokens_per_s": 9.0} for n in (*names, "deepspeed-2", "deepspeed-3")
    }
    assert verdicts(rows)["auto to best ratio"]["is_met"] is True
    found = verdicts({**rows, name: row})
    assert all(verdict["is_met"] is None for verdict in found.values())
    assert all(verdict["untried"] == [name] for verdict in found.values())


@pytest.mark.parametrize(
    ("bound", "chosen", "idle_s", "is_met"),
    [
        ("device", None, 0.02, True),
        ("device", None, 0.2, False),
        ("host", None, 0.2, None),
        ("host", {"ratio": 0.5}, 0.2, False),
    ],
)
def test_idle_time_is_judged_where_nothing_else_bounds_the_step(
    bound: str, chosen: Any, idle_s: float, is_met: bool | None
) -> None:
    row = {"step_s": 1.0, "device_idle_s": idle_s, "bound": bound, "ratio_report": chosen}
    found = with_idle(row)
    assert found["idle_share"] == idle_s
    assert found["is_idle_met"] is is_met
    assert with_idle({"failure": "no"}) == {"failure": "no"}


def test_peak_is_held_against_the_plan_within_5_percent() -> None:
    job = capacity_jobs()[0].dry()
    planned = with_plan({"step_s": 1.0, "device_peak_bytes": None}, job)["planned_peak_bytes"]
    for factor, is_met in ((1.04, True), (0.96, True), (1.06, False), (0.94, False)):
        row = with_plan({"step_s": 1.0, "device_peak_bytes": factor * planned}, job)
        assert row["is_plan_met"] is is_met, factor


def test_stages_are_held_against_torch_in_the_same_dtype() -> None:
    rows = {
        "bf16: torch": {"tokens_per_s": 90.0},
        "bf16: torch, masters by hand": {"tokens_per_s": 100.0},
        "bf16: stage 0": {"tokens_per_s": 97.0},
        "bf16: stage 3": {"tokens_per_s": 96.0},
        "fp32: stage 3": {"tokens_per_s": 96.0},
        "bf16: fsdp2": {"tokens_per_s": 50.0},
    }
    found = in_memory.to_torch(rows, is_judged=True)
    assert found["bf16: stage 0"]["is_met"] is False
    assert found["bf16: stage 3"]["is_met"] is True
    assert found["bf16: fsdp2"]["to_torch"] == 0.5
    assert found["bf16: fsdp2"]["is_met"] is None
    assert "to_torch" not in found["fp32: stage 3"]  # nothing to compare it with


def test_only_this_engine_is_judged_by_its_fragments() -> None:
    rows = {name: {"step_s": 1.0, "reserved_to_allocated": 1.2} for name in ("stage 3", "torch")}
    found = in_memory.with_fragments(rows)
    assert found["stage 3"]["is_met"] is False
    assert found["torch"]["is_met"] is None


@pytest.mark.parametrize("start", [lambda run: run(), lambda run: _in_thread(run)])
def test_operations_of_all_threads_are_late_and_no_value_changes(
    start: Callable[[Callable[[], None]], None],
) -> None:
    x = torch.arange(6.0)
    seen = []
    with delayed(torch.device("cpu"), seed=3, share=0.5) as late:
        start(lambda: seen.extend((x * i).sum().item() for i in range(20)))
        assert 5 < late() < 55  # of at least 40
    assert seen == [15.0 * i for i in range(20)]
    num_late = late()
    x.add_(1)
    assert late() == num_late  # over


def _in_thread(run: Callable[[], None]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_documentation_has_the_tables_of_the_results() -> None:
    folder = ROOT / "integration" / "benchmarks" / "results"
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    section = text.partition("<!-- gpu results: begin -->\n")[2].partition("<!-- gpu results: end")[
        0
    ]
    expected = "No results yet: nothing here has run on an accelerator.\n"
    if (folder / "gpu.json").exists():
        expected = document(Results(folder), PARTS.values())
    assert section == expected


def test_document_has_figures_of_accelerators_alone(parts: Any, tmp_path: Path) -> None:
    results = Results(tmp_path)
    measured = provenance(torch.device("cpu"), is_dry_run=True)
    results.add("single", parts["single"], measured)
    assert document(results, PARTS.values()) == ""
    on_device = {**measured, "is_dry_run": False, "device": "Some GPU", "driver": "1.2"}
    results.add("single", {k: v for k, v in parts["single"].items() if k != "measured"}, on_device)
    text = document(Results(tmp_path), PARTS.values())
    assert "Some GPU, driver 1.2" in text
    assert "| bf16: stage 3 |" in text


@pytest.fixture(scope="module")
def offload_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("offload_cuda")
    chosen = ("--only=speed", "--contender=ratio 0.6", "--contender=deepspeed-2")
    done = run("offload_cuda", *chosen, f"--output={folder}")
    assert done.exit_code == 0, done.output
    return folder, done.stdout


def test_bytes_over_the_bus_follow_the_ratio(offload_run: tuple[Path, str]) -> None:
    folder, said = offload_run
    report = json.loads((folder / "offload_cuda.json").read_text())
    assert report["settings"]["shape"] == vars(DRY_SHAPE)
    rows = report["parts"]["speed"]["rows"]
    assert list(rows) == ["ratio 0.6", "deepspeed-2"]
    row = rows["ratio 0.6"]
    assert row["host_share"] == pytest.approx(0.6, abs=1e-4)
    moved = 2 * 0.6 * row["num_parameters"]  # 16 bits each, once down and once up
    expected = {"bytes_d2h": moved, "bytes_h2d": moved}
    assert row["moved_bytes"] == pytest.approx(expected, rel=1e-3)
    assert (folder / "offload_cuda.png").stat().st_size > 0
    assert "ratio 0.6" in said.partition("written to")[2]


def test_parts_after_the_time_limit_are_skipped_and_named(tmp_path: Path) -> None:
    done = run("offload_cuda", "--time-limit=0", f"--output={tmp_path}")
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "offload_cuda.json").read_text())
    assert report["parts"] == {}
    assert report["skipped"] == [
        f"{part}: the time limit of 0 s is over" for part in ("speed", "timeline", "capacity")
    ]
    assert "capacity: the time limit" in done.stdout


def test_spread_of_losses_is_the_largest_at_any_step() -> None:
    losses = {"ratio 1.0": [4.0, 2.0, 9.0], "ratio 0.6": [4.0, 2.1], "fsdp2": [8.0, 8.0]}
    rows: dict[str, Any] = {name: {"step_s": 1, "losses": row} for name, row in losses.items()}
    rows["ratio auto"] = {"failure": "no"}
    assert loss_spread(rows) == pytest.approx(0.05)
    assert loss_spread({}) is None


def test_model_that_the_host_cannot_hold_is_skipped_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(capacity, "available_bytes", lambda: 2 * GIB)
    context = Context(torch.device("cpu"), False, Runner(60.0), tmp_path)
    row = capacity.capacity(capacity_jobs()[:1], context)["rows"]["tutorial, bf16"]
    assert row["planned_host_bytes"] > 12 * 10e9
    needed = row["planned_host_bytes"] / GIB
    assert row["skipped"] == f"needs {needed:.1f} GiB of host memory, 2.0 are available"


def test_sizes_are_those_of_the_tutorial() -> None:
    assert {job.micro_batch for job in capacity_jobs()} == {10}
    assert (capacity.TUTORIAL.layers, capacity.TUTORIAL.width) == (50, 4096)
    assert capacity.TUTORIAL.numel / 1e9 == pytest.approx(10.3, abs=0.1)
    assert capacity.WIDE.numel / 1e9 == pytest.approx(12.9, abs=0.1)


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


@pytest.mark.parametrize("name", ["gpu", "offload_cuda", "comm_cuda"])
def test_without_an_accelerator_the_program_names_the_dry_run(name: str) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    done = CliRunner().invoke(command(name), [])
    assert done.exit_code == 2
    assert "--dry-run" in done.stderr
