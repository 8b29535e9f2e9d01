"""The Triton kernels of the block quantizer against copy bandwidth.

[Note: figures]
Each row is one operation (encode; decode; decode_sum of 8 rows), kind, dtype and size. Its
**moved** bytes are those that it must read and write, in closed form. A device-to-device copy that
moves as many is timed in the same rounds, in turns with the Triton kernel and with the plain torch
backend on the device. **share** is the copy's time over the kernel's: the kernel's bandwidth as a
share of copy bandwidth. A small tensor's time is that of starting a kernel. The bar, 0.8, is for
sizes of 64 Mi elements and more, which no cache holds.
packages/zero-comm/tests/test_quantizer_backends.py compares the results with the host's, on an
accelerator where there is one.

Needs an accelerator that Triton serves. A dry run is in Triton's interpreter, or with the torch
backend alone where triton isn't installed. There, figures of an accelerator are null.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from benchmarks.experiments.gpu.part import Context, Part
from benchmarks.harness.models import find_device
from benchmarks.harness.ranks import Place, Row
from benchmarks.harness.report import US, Column, Section, bars
from benchmarks.harness.rounds import has_figures, measured, take_turns
from benchmarks.harness.train import timed_together
from zero_comm import BlockFormat
from zero_comm.quantizer.backend import Backend, find_backend
from zero_comm.quantizer.torch_backend import TorchBackend

MI: Final = 1 << 20
KINDS: Final = ("int8", "int4", "e4m3", "e5m2")
DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}
BAR: Final = 0.8
"""Share of copy bandwidth that is asked for."""
BAR_NUMEL: Final = 64 * MI
"""Elements from which on it is asked for."""
SUM_ROWS: Final = 8
MEASURING: Final = 0.8
"""Share of the part's time in which a row may begin."""


@dataclass(frozen=True)
class Settings:
    """Kinds and sizes of a measurement."""

    kinds: Sequence[str]
    numels: Sequence[int]
    """Elements, each a multiple of every block size."""
    rounds: int
    calls: int
    """Calls of each contender in a round, timed together."""


REAL: Final = Settings(KINDS, (64 * MI, 256 * MI, 16 * MI, 4 * MI, MI), rounds=7, calls=10)
DRY: Final = Settings(KINDS, (1 << 10, 1 << 12), rounds=1, calls=1)


def _run(context: Context) -> Row:
    # It stops by itself before it would be ended.
    deadline = time.time() + MEASURING * context.runner.left_s()
    settings = DRY if context.is_dry_run else REAL
    target = f"{__name__}:measure"
    (found,) = context.runner.start(target, {"settings": settings, "deadline": deadline})
    rows: dict[str, Row] = {_name(row): row for row in found.pop("rows", ())}
    if num_left := found.pop("num_left", 0):
        rows["others"] = {"skipped": f"{num_left} rows: the time was over"}
    if not has_figures(found):
        rows["all"] = found
    return {"bar": BAR, "backend": found.get("backend"), "rows": rows}


def _name(row: Row) -> str:
    return f"{row['operation']} {row['kind']} {row['dtype']} {row['numel']}"


def measure(place: Place, settings: Mapping[str, Any], deadline: float) -> Row:
    """Measure all rows in a process of their own. A target of `benchmarks.harness.ranks`.

    The result is written row by row, the sizes of the bar first. Rows after ``deadline``,
    a time of `time.time`, are counted.
    """
    what = Settings(**settings)
    device = find_device()
    backend = interpreted() if device.type == "cpu" else on_device(device)
    found: Row = {"backend": backend.name, "rows": [], "num_left": 0}
    for job in operations(what, device):
        if time.time() > deadline:
            found["num_left"] += 1
            continue
        row = dict(job.about)
        try:
            row |= compare(job, backend, what, device)
        except Exception as error:  # a kernel that does not compile: a row
            row["failure"] = f"{type(error).__name__}: {error}"
        found["rows"].append(row)
        place.write(found)
    return found


def on_device(device: torch.device) -> Backend:
    """Return Triton's kernels, or raise LookupError if another backend serves ``device``."""
    backend = find_backend(device)
    if backend.name != "triton":
        raise LookupError(
            f"the {backend.name} backend serves {device}, and Triton's kernels are what is "
            "measured: install triton, unset ZERO_COMM_BACKEND"
        )
    return backend


def interpreted() -> Backend:
    """Return the kernels in Triton's interpreter, or the torch backend where triton is missing.

    Sets TRITON_INTERPRET of this process, which has not imported triton.
    """
    if importlib.util.find_spec("triton") is None:
        return TorchBackend()
    os.environ["TRITON_INTERPRET"] = "1"  # triton reads it as it is imported
    from zero_comm.quantizer.triton_backend import BACKEND

    # NumPy, which interprets, warns of overflow that is meant.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
    return BACKEND


class Operation(NamedTuple):
    """One operation on tensors of one size.

    ``about`` is its row: ``operation``, ``kind``, ``dtype``, ``numel``, and ``moved_bytes``, those
    read and written at the least.
    """

    about: Row
    run: Callable[[Backend], object]


def operations(settings: Settings, device: torch.device) -> Iterator[Operation]:
    """Yield all operations, each made when it is taken: together they would fill the device."""
    for numel in settings.numels:
        for fmt in map(BlockFormat.make, settings.kinds):
            for dtype in DTYPES:
                yield _encode(fmt, dtype, numel, device)
                yield _decode(fmt, dtype, numel, 1, device)
            yield _decode(fmt, "fp32", numel, SUM_ROWS, device)


def _values(num_rows: int, numel: int, device: torch.device) -> Tensor:
    """Return values with runs of many magnitudes, fp32."""
    runs = torch.randint(-20, 5, (num_rows, numel // 32), device=device)
    scales = torch.exp2(runs.float()).repeat_interleave(32, 1)
    return scales.mul_(torch.randn(num_rows, numel, device=device))


def _encode(fmt: BlockFormat, dtype: str, numel: int, device: torch.device) -> Operation:
    x = _values(1, numel, device).to(DTYPES[dtype])
    out = torch.empty(1, fmt.nbytes(numel), dtype=torch.uint8, device=device)
    about = _about("encode", fmt, dtype, numel, x.nbytes + out.nbytes)
    return Operation(about, lambda backend: backend.encode(x, out, fmt, None))


def _decode(
    fmt: BlockFormat, dtype: str, numel: int, num_rows: int, device: torch.device
) -> Operation:
    """Return decoding a row, or the sum of several."""
    rows = torch.empty(num_rows, fmt.nbytes(numel), dtype=torch.uint8, device=device)
    TorchBackend().encode(_values(num_rows, numel, device), rows, fmt, None)
    out = torch.empty(1, numel, dtype=DTYPES[dtype], device=device)

    def run(backend: Backend) -> None:
        if num_rows > 1:
            backend.decode_sum(rows, out[0], fmt)
        else:
            backend.decode(rows, out, fmt)

    name = f"decode_sum of {num_rows}" if num_rows > 1 else "decode"
    return Operation(_about(name, fmt, dtype, numel, rows.nbytes + out.nbytes), run)


def _about(operation: str, fmt: BlockFormat, dtype: str, numel: int, moved_bytes: int) -> Row:
    about = {"operation": operation, "kind": fmt.kind, "dtype": dtype, "numel": numel}
    return {**about, "moved_bytes": moved_bytes}


def compare(job: Operation, backend: Backend, settings: Settings, device: torch.device) -> Row:
    """Time ``backend``, plain torch and a copy of as many bytes."""
    backends: dict[str, Backend] = {"torch": TorchBackend(), backend.name: backend}
    source = torch.zeros(job.about["moved_bytes"] // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def run(name: str) -> None:
        if name == "copy":
            target.copy_(source)
        else:
            job.run(backends[name])

    def time_s(name: str, _: int) -> Row:
        return {"s": timed_together(lambda: run(name), settings.calls, device)}

    contenders = ["copy", *backends]
    for name in contenders:
        run(name)  # compiles and allocates
    found = take_turns(contenders, settings.rounds, time_s)
    times = {name: statistics.median(row["s"] for row in rows) for name, rows in found.items()}
    return {
        "backend": backend.name,
        "median_s": times,
        **figures(times, job.about, backend.name, device),
    }


def figures(times: Mapping[str, float], about: Row, name: str, device: torch.device) -> Row:
    """Return bandwidths and their ratios, null on a CPU."""
    if device.type == "cpu":
        keys = ("bytes_per_s", "copy_bytes_per_s", "share", "times_torch", "is_met")
        return dict.fromkeys(keys)
    share = times["copy"] / times[name]
    return {
        "bytes_per_s": about["moved_bytes"] / times[name],
        "copy_bytes_per_s": about["moved_bytes"] / times["copy"],
        "share": share,
        "times_torch": times["torch"] / times[name],
        "is_met": share >= BAR if about["numel"] >= BAR_NUMEL else None,
    }


def _section(found: Row) -> Section:
    """Return a line per row of the largest size, which the bar is for.

    Cells of figures that this device does not have are empty.
    """
    title, rows = f"{found['backend']} kernels, the largest tensors", found["rows"]
    there = measured(rows)
    largest = max((row["numel"] for row in there.values()), default=0)
    of_largest = {name: row for name, row in there.items() if row["numel"] == largest}
    has_share = any(row["share"] is not None for row in there.values())

    def microseconds(row: Row) -> float:
        return float(row["median_s"][row["backend"]]) / US

    columns = (
        Column("µs", microseconds, ".1f"),
        Column("GB/s", "bytes_per_s", ".0f", 1e9),
        Column("of copy", "share", ".2f"),
        Column("torch / it", "times_torch", ".1f"),
        Column("bar", "is_met"),
    )
    panels = (
        bars(title, of_largest, {"": "share"}, "share of copy bandwidth", bar=BAR)
        if has_share
        else bars(title, of_largest, {"": microseconds}, "µs")
    )
    left_out = {name: row for name, row in rows.items() if name not in there}
    caption = f"bar: {BAR} of copy bandwidth from {BAR_NUMEL // MI} Mi elements on"
    return Section(title, {**of_largest, **left_out}, columns, caption, "operation", panels)


PART = Part("quantizers", "Triton's quantizer kernels against copy bandwidth", 3.0, _run, _section)
