"""Bandwidth of the block quantizer's Triton kernels relative to copy bandwidth.

[Note: figures]
A row is one operation (encode, decode, decode_sum of 8 rows), kind, dtype and size. Its moved bytes
are the bytes that the operation must read and write. Three contenders take turns in the same
rounds: the Triton kernel, the plain torch backend on the device, and a device-to-device copy of as
many bytes. The share is the copy's time over the kernel's. No cache holds the tensors. A kernel
whose result differs from plain torch's on the device, which zero-comm's tests compare with the
host's, becomes a row with a failure.

A dry run uses Triton's interpreter, or only the torch backend where triton is not installed. Its
figures of an accelerator are null.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import statistics
import timeit
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from benchmarks.experiments.gpu.part import Context, Part
from benchmarks.harness.models import find_device
from benchmarks.harness.ranks import Place, Row
from benchmarks.harness.report import US, Column, Section
from benchmarks.harness.rounds import has_figures, take_turns
from zero_comm import BlockFormat
from zero_comm.quantizer.backend import Backend, find_backend
from zero_comm.quantizer.torch_backend import TorchBackend

MI: Final = 1 << 20
DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}
BAR: Final = 0.8
"""Minimum share of copy bandwidth."""
SUM_ROWS: Final = 8
FIRST_KINDS, OTHER_KINDS = ("int8", "int4"), ("e4m3", "e5m2")
_BUSY_WIDTH = 8192
"""Width of a matrix product of about 1.5 ms, as long as the launches of 10 calls."""
REAL: Final = ((64 * MI, 256 * MI), 7, 10)
DRY: Final = ((1 << 10, 1 << 12), 1, 1)
"""Sizes, rounds, and calls of each contender in a round, which are timed together."""


def _run(context: Context) -> Row:
    arguments = {"is_dry_run": context.is_dry_run}
    (found,) = context.runner.start(f"{__name__}:measure", arguments)
    rows: dict[str, Row] = {_name(row): row for row in found.pop("rows", ())}
    if not has_figures(found):
        rows["all"] = found
    return {"bar": BAR, "backend": found.get("backend"), "rows": rows}


def _name(row: Row) -> str:
    return f"{row['operation']} {row['kind']} {row['dtype']} {row['numel']}"


def measure(place: Place, is_dry_run: bool) -> Row:
    """Measure all rows in this process, and write the result after every row."""
    sizes, rounds, calls = DRY if is_dry_run else REAL
    device = find_device()
    backend = kernels(device)
    found: Row = {"backend": backend.name, "rows": []}
    # The usual kinds are measured first, because the time may end before the last row.
    for kinds in (FIRST_KINDS, OTHER_KINDS):
        for job in operations(kinds, sizes, device):
            row = dict(job.about)
            try:
                row |= compare(job, backend, rounds, calls)
            except Exception as error:  # wrong results and failed compilations become rows
                row["failure"] = f"{type(error).__name__}: {error}"
            found["rows"].append(row)
            place.write(found)
    return found


def kernels(device: torch.device) -> Backend:
    """Return Triton's backend: on a CPU in its interpreter, or plain torch if there is no triton.

    Raises LookupError if another backend serves the accelerator ``device``.
    """
    if device.type != "cpu":
        backend = find_backend(device)
        if backend.name != "triton":
            raise LookupError(
                f"the {backend.name} backend serves {device}, and Triton's kernels are what is "
                "measured: install triton, unset ZERO_COMM_BACKEND"
            )
        return backend
    if importlib.util.find_spec("triton") is None:
        return TorchBackend()
    os.environ["TRITON_INTERPRET"] = "1"  # triton reads this variable when it is imported
    from zero_comm.quantizer.triton_backend import BACKEND

    # The interpreter computes with NumPy, which warns of intended overflows.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
    return BACKEND


@dataclass(frozen=True)
class Operation:
    """One quantizer operation on tensors of one size."""

    about: Row
    """``operation``, ``kind``, ``dtype``, ``numel`` and ``moved_bytes``, the bytes that
    must be read and written."""
    run: Callable[[Backend], object]
    out: Tensor
    """The result of ``run``."""


def operations(
    kinds: Sequence[str], numels: Sequence[int], device: torch.device
) -> Iterator[Operation]:
    """Yield operations one at a time, because the tensors of all would not fit on the device."""
    for fmt in map(BlockFormat.make, kinds):
        for dtype, numel in itertools.product(DTYPES, numels):
            x = _values(1, numel, device).to(DTYPES[dtype])
            yield _encode(fmt, dtype, x)
            yield _decode(fmt, dtype, x)
        for numel in numels:
            yield _decode(fmt, "fp32", _values(SUM_ROWS, numel, device))


def _values(num_rows: int, numel: int, device: torch.device) -> Tensor:
    """Return fp32 values whose magnitude changes every 32 elements."""
    x = torch.randn(num_rows, numel // 32, 32, device=device)
    return x.mul_(torch.exp2(torch.randint_like(x[..., :1], -20, 5))).view(num_rows, numel)


def _encode(fmt: BlockFormat, dtype: str, x: Tensor) -> Operation:
    out = torch.zeros(len(x), fmt.nbytes(x.shape[1]), dtype=torch.uint8, device=x.device)
    about = _about("encode", fmt, dtype, x.shape[1], x.nbytes + out.nbytes)
    return Operation(about, lambda backend: backend.encode(x, out, fmt, None), out)


def _decode(fmt: BlockFormat, dtype: str, x: Tensor) -> Operation:
    rows = _encode(fmt, dtype, x)
    rows.run(TorchBackend())
    out = torch.empty_like(x[:1])

    def run(backend: Backend) -> None:
        if len(x) > 1:
            backend.decode_sum(rows.out, out[0], fmt)
        else:
            backend.decode(rows.out, out, fmt)

    name = f"decode_sum of {len(x)}" if len(x) > 1 else "decode"
    return Operation(_about(name, fmt, dtype, x.shape[1], rows.out.nbytes + out.nbytes), run, out)


def _about(operation: str, fmt: BlockFormat, dtype: str, numel: int, moved_bytes: int) -> Row:
    about = {"operation": operation, "kind": fmt.kind, "dtype": dtype, "numel": numel}
    return {**about, "moved_bytes": moved_bytes}


def time_s(run: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return the seconds per call of ``run``, which must have been called once already.

    The host takes longer to launch a call than a small kernel takes to run. An accelerator
    therefore first gets another product, during which the host launches all calls. The calls then
    run back to back, and nothing else runs between the two events.
    """
    if device.type == "cpu":
        return timeit.timeit(run, number=calls) / calls
    busy = torch.zeros(_BUSY_WIDTH, _BUSY_WIDTH, dtype=torch.bfloat16, device=device)
    start, stop = (torch.Event(device.type, enable_timing=True) for _ in range(2))
    torch.mm(busy, busy)
    start.record()
    timeit.timeit(run, number=calls)  # turns the garbage collector off while it launches
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3 / calls


def compare(job: Operation, backend: Backend, rounds: int, calls: int) -> Row:
    """Check ``backend``, then time ``backend``, plain torch, and a copy of as many bytes."""
    device = job.out.device
    backends: dict[str, Backend] = {"torch": TorchBackend(), backend.name: backend}
    job.run(backends["torch"])
    expected = job.out.clone()
    job.out.fill_(77)
    job.run(backend)
    if not torch.equal(job.out, expected):
        raise RuntimeError(
            f"{_name(job.about)}: the {backend.name} backend on {device} gives another result than "
            "torch: run packages/zero-comm/tests/test_quantizer_backends.py there"
        )
    source = torch.zeros(job.about["moved_bytes"] // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def run(name: str) -> None:
        if name == "copy":
            target.copy_(source)
        else:
            job.run(backends[name])

    def take_turn(name: str, _: int) -> Row:
        return {"s": time_s(lambda: run(name), calls, device)}

    run("copy")  # allocates the copy's memory, as the checks above did for the others
    found = take_turns(["copy", *backends], rounds, take_turn)
    times = {name: statistics.median(row["s"] for row in rows) for name, rows in found.items()}
    share = times["copy"] / times[backend.name]
    figures = {
        "bytes_per_s": job.about["moved_bytes"] / times[backend.name],
        "copy_bytes_per_s": job.about["moved_bytes"] / times["copy"],
        "share": share,
        "times_torch": times["torch"] / times[backend.name],
        "is_met": share >= BAR,
    }
    shown = dict.fromkeys(figures) if device.type == "cpu" else figures
    return {"backend": backend.name, "median_s": times, **shown}


def _section(found: Row) -> Section:
    def microseconds(row: Row) -> float:
        return float(row["median_s"][row["backend"]]) / US

    columns = (
        Column("µs", microseconds, ".1f"),
        Column("GB/s", "bytes_per_s", ".0f", 1e9),
        Column("of copy", "share", ".2f"),
        Column("torch / it", "times_torch", ".1f"),
        Column("bar", "is_met"),
    )
    title, caption = f"{found['backend']} kernels", f"bar: {BAR} of copy bandwidth"
    return Section(title, found["rows"], columns, caption, "operation")


PART = Part("quantizers", "Triton's quantizer kernels against copy bandwidth", 3.0, _run, _section)
