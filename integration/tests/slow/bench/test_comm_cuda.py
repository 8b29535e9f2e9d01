"""The benchmark of the quantizer's kernels, as far as a CPU can show it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from benchmarks.__main__ import command
from benchmarks.experiments.comm_cuda import (
    BAR_NUMEL,
    DRY,
    MI,
    REAL,
    Settings,
    Stopwatch,
    WrongResultError,
    compare,
    figures,
    operations,
    section,
    verdict,
)
from zero_comm import BlockFormat, quantized_nbytes
from zero_comm.quantizer.torch_backend import TorchBackend

CPU = torch.device("cpu")
PROGRAM = Path(__file__).parents[3] / "benchmarks" / "run.py"
SMALL = Settings(("int4",), (512, 1024), 512, rounds=1, calls=1)


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Not forked: Triton reads as it is imported that it interprets, and torch may import it.
    command = [sys.executable, "-W", "error", str(PROGRAM), "comm_cuda", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("comm_cuda")
    done = run_program("--dry-run", "--kind=int4", "--kind=e5m2", f"--output={folder}")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


@pytest.fixture(scope="module")
def report(dry_run: tuple[Path, str]) -> Any:
    return json.loads((dry_run[0] / "comm_cuda.json").read_text())


def test_dry_run_says_which_backend_ran_and_writes_table_and_picture(
    dry_run: tuple[Path, str], report: Any
) -> None:
    folder, said = dry_run
    backend = "triton" if report["is_interpreted"] else "torch"
    assert said.startswith(f"{backend} backend on the CPU")
    assert (folder / "comm_cuda.png").stat().st_size > 0
    assert (folder / "comm_cuda.md").read_text() in said


def test_dry_run_interprets_the_kernels_where_triton_is_there(report: Any) -> None:
    pytest.importorskip("triton", reason="triton isn't installed: the dry run takes torch")
    assert report["is_interpreted"]
    assert {row["backend"] for row in report["rows"]} == {"triton"}


def test_every_kind_dtype_size_and_operation_is_a_row_equal_to_the_host(report: Any) -> None:
    rows = report["rows"]
    keys = {(row["operation"], row["kind"], row["dtype"], row["numel"]) for row in rows}
    expected = {
        (operation, kind, dtype, numel)
        for kind in ("int4", "e5m2")
        for numel in DRY.numels
        for dtype in ("bf16", "fp32")
        for operation in ("encode", "decode")
    } | {
        ("decode_sum of 8", kind, "fp32", numel)
        for kind in ("int4", "e5m2")
        for numel in DRY.numels
    }
    assert keys == expected
    assert len(rows) == len(keys)
    assert all(all(row["is_equal_to_host"].values()) for row in rows)


def test_moved_bytes_are_what_is_read_and_written(report: Any) -> None:
    for row in report["rows"]:
        numel, buffer = row["numel"], quantized_nbytes(row["numel"], row["kind"])
        values = numel * {"bf16": 2, "fp32": 4}[row["dtype"]]
        buffers = 8 if row["operation"] == "decode_sum of 8" else 1
        assert row["moved_bytes"] == buffers * buffer + values


def test_figures_of_a_gpu_are_null_on_the_cpu(report: Any) -> None:
    for row in report["rows"]:
        for key in ("bytes_per_s", "copy_bytes_per_s", "share", "times_torch", "is_met"):
            assert row[key] is None
        assert all(seconds > 0 for seconds in row["median_s"].values())
        assert set(row["median_s"]) == {"copy", "torch", row["backend"]}


class _OneBitOff(TorchBackend):
    """Plain torch, whose last code or value is wrong."""

    name = "wrong"

    def encode(self, x: Tensor, rows: Tensor, fmt: BlockFormat, seed: int | None) -> bool | None:
        found = super().encode(x, rows, fmt, seed)
        rows[-1, fmt.codes_nbytes(x.shape[1]) - 1] ^= 1
        return found

    def decode(self, rows: Tensor, out: Tensor, fmt: BlockFormat) -> None:
        super().decode(rows, out, fmt)
        out[-1, -1] += 1

    def decode_sum(self, rows: Tensor, out: Tensor, fmt: BlockFormat) -> None:
        super().decode_sum(rows, out, fmt)
        out[-1] += 1


def test_backend_that_is_one_bit_off_is_refused_in_every_operation() -> None:
    refused = set()
    for job in operations(SMALL, CPU):
        name = job.about["operation"]
        with pytest.raises(WrongResultError, match=f"{name} int4 .* the wrong backend"):
            compare(job, _OneBitOff(), SMALL, Stopwatch(CPU), CPU)
        refused.add(name)
    assert refused == {"encode", "decode", "decode_sum of 8"}


@pytest.mark.parametrize(
    ("numel", "kernel_s", "share", "is_met"),
    [(BAR_NUMEL, 1.25, 0.8, True), (BAR_NUMEL, 1.3, 1 / 1.3, False), (MI, 2.0, 0.5, None)],
)
def test_share_is_the_copys_time_over_the_kernels(
    numel: int, kernel_s: float, share: float, is_met: bool | None
) -> None:
    about = {"operation": "encode", "kind": "int4", "dtype": "bf16", "numel": numel}
    times = {"copy": 1.0, "torch": 5.2, "triton": kernel_s}
    device = torch.device("cuda", 0)
    found = figures(times, {**about, "moved_bytes": 600}, "triton", device)
    assert found["share"] == pytest.approx(share)
    assert found["is_met"] is is_met
    assert found["bytes_per_s"] == pytest.approx(600 / kernel_s)
    assert found["times_torch"] == pytest.approx(5.2 / kernel_s)
    row = {**about, **found, "median_s": times, "backend": "triton"}
    word = {None: "80% of copy bandwidth", True: "1 of 1", False: "0 of 1"}[is_met]
    assert word in verdict([row])
    assert section("", {"": row}).table.row_count == 1


def test_sizes_are_whole_patterns_from_1_to_256_mi() -> None:
    assert (REAL.numels[0], REAL.numels[-1]) == (MI, 256 * MI)
    for settings in (REAL, DRY):
        assert all(numel % settings.pattern_numel == 0 for numel in settings.numels)
        for kind in settings.kinds:
            assert settings.pattern_numel % BlockFormat.make(kind).block_size == 0


def test_unknown_kind_is_refused_with_those_known(tmp_path: Path) -> None:
    options = ["--dry-run", "--kind=int3", f"--output={tmp_path}"]
    done = CliRunner().invoke(command("comm_cuda"), options)
    assert done.exit_code == 2
    assert "unknown 'int3'; known: int8" in done.stderr
