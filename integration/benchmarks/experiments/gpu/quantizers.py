"""Bandwidth of the block quantizer's Triton kernels relative to copy bandwidth.

[Note: figures]
A row is one operation (encode, decode, decode_sum of 8 rows), kind, dtype and size. Its moved bytes
are the bytes that the operation must read and write. Three contenders take turns in the same
rounds: the Triton kernel, the plain torch backend on the device, and a device-to-device copy of as
many bytes. The share is the copy's time over the kernel's. The bar (0.8) applies to sizes of at
least 64 Mi elements, which no cache holds. Each result is first compared with that of the torch
backend on the host. A kernel with a different result becomes a row with a failure.

The tensors repeat a pattern of whole blocks. Blocks are independent, so the result is the repeated
result of the pattern, which the host computes once for all sizes.

A dry run uses Triton's interpreter, or only the torch backend where triton is not installed. Its
figures of an accelerator are null.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import statistics
import time
import timeit
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from benchmarks.experiments.gpu.part import Context, Part
from benchmarks.harness.models import find_device
from benchmarks.harness.ranks import Place, Row
from benchmarks.harness.report import US, Column, Section
from benchmarks.harness.rounds import has_figures, measured, take_turns
from benchmarks.harness.train import synchronize
from zero_comm import BlockFormat
from zero_comm.quantizer.backend import Backend, find_backend
from zero_comm.quantizer.torch_backend import TorchBackend

MI: Final = 1 << 20
DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}
BAR: Final = 0.8
"""Least share of copy bandwidth."""
BAR_NUMEL: Final = 64 * MI
"""Elements of the smallest tensor to which the bar applies."""
SUM_ROWS: Final = 8
FIRST_KINDS, OTHER_KINDS = ("int8", "int4"), ("e4m3", "e5m2")
MEASURING: Final = 0.8
"""Share of the part's time after which no row begins."""
_BUSY_WIDTH = 4096
_HOST = TorchBackend()


@dataclass(frozen=True)
class Settings:
    numels: Sequence[int]
    """Elements per tensor, each a multiple of ``pattern_numel``."""
    pattern_numel: int
    """Elements of the repeated pattern, a multiple of every block size."""
    rounds: int
    calls: int
    """Calls of each contender in a round, timed together."""


REAL: Final = Settings((MI, 4 * MI, 16 * MI, 64 * MI, 256 * MI), MI, rounds=7, calls=10)
DRY: Final = Settings((1 << 10, 1 << 12), 1 << 10, rounds=1, calls=1)


def _run(context: Context) -> Row:
    # The measurement stops itself before its process would be killed.
    deadline = time.time() + MEASURING * context.runner.left_s()
    arguments = {"is_dry_run": context.is_dry_run, "deadline": deadline}
    (found,) = context.runner.start(f"{__name__}:measure", arguments)
    rows: dict[str, Row] = {_name(row): row for row in found.pop("rows", ())}
    if num_left := found.pop("num_left", 0):
        rows["others"] = {"skipped": f"{num_left} rows: the time was over"}
    if not has_figures(found):
        rows["all"] = found
    return {"bar": BAR, "backend": found.get("backend"), "rows": rows}


def _name(row: Row) -> str:
    return f"{row['operation']} {row['kind']} {row['dtype']} {row['numel']}"


def measure(place: Place, is_dry_run: bool, deadline: float) -> Row:
    """Measure all rows in this process. A target of `benchmarks.harness.ranks`.

    The result is written after every row. Rows that would begin after ``deadline`` (a `time.time`)
    are only counted.
    """
    what = DRY if is_dry_run else REAL
    device = find_device()
    backend = interpreted() if device.type == "cpu" else on_device(device)
    stopwatch = Stopwatch(device)
    found: Row = {"backend": backend.name, "rows": [], "num_left": 0}
    # The kinds and sizes with a bar are measured first, because the time may end before the last
    # row.
    large = [numel for numel in what.numels if numel >= BAR_NUMEL]
    small = [numel for numel in what.numels if numel < BAR_NUMEL]
    for kinds, numels in itertools.product((FIRST_KINDS, OTHER_KINDS), (large, small)):
        for job in operations(kinds, numels, what.pattern_numel, device):
            if time.time() > deadline:
                found["num_left"] += 1
                continue
            row = dict(job.about)
            try:
                row |= compare(job, backend, what, stopwatch, device)
            except Exception as error:  # wrong results and failed compilations become rows
                row["failure"] = f"{type(error).__name__}: {error}"
            found["rows"].append(row)
            place.write(found)
    return found


def on_device(device: torch.device) -> Backend:
    """Return Triton's backend, or raise LookupError if another backend serves ``device``."""
    backend = find_backend(device)
    if backend.name != "triton":
        raise LookupError(
            f"the {backend.name} backend serves {device}, and Triton's kernels are what is "
            "measured: install triton, unset ZERO_COMM_BACKEND"
        )
    return backend


def interpreted() -> Backend:
    """Return Triton's backend in its interpreter, or the torch backend without triton.

    Sets TRITON_INTERPRET in this process, before triton is imported.
    """
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
    """``operation``, ``kind``, ``dtype``, ``numel`` and ``moved_bytes``, the least bytes read and
    written."""
    run: Callable[[Backend], object]
    spoil: Callable[[], object]
    """Overwrites the last run's result."""
    is_right: Callable[[], bool]
    """Returns whether the last run's result equals the host's. Waits for the device."""


def operations(
    kinds: Sequence[str], numels: Sequence[int], pattern_numel: int, device: torch.device
) -> Iterator[Operation]:
    """Yield operations one at a time, because the tensors of all would not fit on the device."""
    for fmt in map(BlockFormat.make, kinds):
        for dtype, numel in itertools.product(DTYPES, numels):
            pattern = _pattern(1, pattern_numel).to(DTYPES[dtype])
            yield _encode(fmt, dtype, numel, pattern, device)
            yield _decode(fmt, dtype, numel, pattern, device)
        for numel in numels:
            pattern = _pattern(SUM_ROWS, pattern_numel)
            yield _decode(fmt, "fp32", numel, pattern, device)


def _pattern(num_rows: int, numel: int) -> Tensor:
    """Return fp32 values on the host whose magnitude changes every 32 elements."""
    generator = torch.Generator().manual_seed(numel + num_rows)
    x = torch.randn(num_rows, numel, generator=generator)
    runs = torch.randint(-20, 5, (num_rows, numel // 32), generator=generator)
    return x * torch.exp2(runs.float()).repeat_interleave(32, 1)


def _encoded(pattern: Tensor, fmt: BlockFormat) -> Tensor:
    rows = torch.empty(len(pattern), fmt.nbytes(pattern.shape[1]), dtype=torch.uint8)
    _HOST.encode(pattern, rows, fmt, None)
    return rows


def _repeated_rows(pattern: Tensor, numel: int, fmt: BlockFormat, device: torch.device) -> Tensor:
    """Return the quantized rows of ``pattern`` repeated up to ``numel`` elements each."""
    part = pattern.shape[1]
    rows = _encoded(pattern, fmt)
    whole = torch.zeros(len(rows), fmt.nbytes(numel), dtype=torch.uint8, device=device)
    # Positions in bytes where codes begin, codes end, and scales end.
    stops = (0, fmt.codes_nbytes(part), fmt.used_nbytes(part))
    stops_of_whole = (0, fmt.codes_nbytes(numel), fmt.used_nbytes(numel))
    for i in (0, 1):
        source = rows[:, stops[i] : stops[i + 1]].to(device)
        target = whole[:, stops_of_whole[i] : stops_of_whole[i + 1]]
        target.view(len(rows), numel // part, -1).copy_(source[:, None, :])
    return whole


def _encode(
    fmt: BlockFormat, dtype: str, numel: int, pattern: Tensor, device: torch.device
) -> Operation:
    x = pattern.to(device).repeat(1, numel // pattern.shape[1])
    out = torch.empty(1, fmt.nbytes(numel), dtype=torch.uint8, device=device)
    return Operation(
        _about("encode", fmt, dtype, numel, x.nbytes + out.nbytes),
        run=lambda backend: backend.encode(x, out, fmt, None),
        spoil=lambda: out.fill_(0xA5),
        is_right=lambda: torch.equal(out, _repeated_rows(pattern, numel, fmt, device)),
    )


def _decode(
    fmt: BlockFormat, dtype: str, numel: int, pattern: Tensor, device: torch.device
) -> Operation:
    def run(backend: Backend, rows: Tensor, out: Tensor) -> None:
        if len(rows) > 1:
            backend.decode_sum(rows, out[0], fmt)
        else:
            backend.decode(rows, out, fmt)

    def is_right() -> bool:
        """Return whether the result repeats the pattern's result. 0 and -0 count as equal."""
        there = expected[0].to(device)
        return bool((out[0].view(-1, len(there)) == there).all())

    rows = _repeated_rows(pattern, numel, fmt, device)
    out = torch.empty(1, numel, dtype=DTYPES[dtype], device=device)
    expected = torch.empty_like(pattern[:1])
    run(_HOST, _encoded(pattern, fmt), expected)
    name = f"decode_sum of {len(rows)}" if len(rows) > 1 else "decode"
    return Operation(
        _about(name, fmt, dtype, numel, rows.nbytes + out.nbytes),
        run=lambda backend: run(backend, rows, out),
        spoil=lambda: out.fill_(-77),
        is_right=is_right,
    )


def _about(operation: str, fmt: BlockFormat, dtype: str, numel: int, moved_bytes: int) -> Row:
    about = {"operation": operation, "kind": fmt.kind, "dtype": dtype, "numel": numel}
    return {**about, "moved_bytes": moved_bytes}


class Stopwatch:
    """Measures the time of calls, by events on an accelerator and by the clock on a CPU.

    The host takes longer to launch a call than a small kernel takes to run. The device therefore
    first gets other work, during which the host launches all calls. The calls then run back to
    back, and the time between two events is theirs alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._busy_s = 0.0
        if device.type != "cpu":
            self._busy = torch.zeros(_BUSY_WIDTH, _BUSY_WIDTH, dtype=torch.bfloat16, device=device)
            self._keep_busy(3)
            self._busy_s = self._between_events(lambda: self._keep_busy(1), 10)

    def time_s(self, run: Callable[[], object], calls: int) -> float:
        """Return the seconds per call of ``run``, which must have been called once already."""
        # timeit turns the garbage collector off while it measures.
        if self._device.type == "cpu":
            return timeit.timeit(run, number=calls) / calls
        synchronize(self._device)
        host_s = calls * timeit.timeit(run, number=1)
        synchronize(self._device)
        self._keep_busy(math.ceil(2 * host_s / self._busy_s))
        return self._between_events(run, calls)

    def _keep_busy(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self._busy, self._busy)

    def _between_events(self, run: Callable[[], object], calls: int) -> float:
        start, stop = (torch.Event(self._device.type, enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3 / calls


class WrongResultError(RuntimeError):
    """A backend's result differs from the host's."""


def compare(
    job: Operation, backend: Backend, settings: Settings, stopwatch: Stopwatch, device: torch.device
) -> Row:
    """Check ``backend``, then time ``backend``, plain torch, and a copy of as many bytes."""
    backends: dict[str, Backend] = {"torch": TorchBackend(), backend.name: backend}
    is_equal = {}
    for name, contender in backends.items():
        job.spoil()
        job.run(contender)
        is_equal[name] = job.is_right()
    if not is_equal[backend.name]:
        raise WrongResultError(
            f"{_name(job.about)}: the {backend.name} backend on {device} gives another result than "
            "torch on the host: run packages/zero-comm/tests/test_quantizer_backends.py there"
        )
    source = torch.zeros(job.about["moved_bytes"] // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def run(name: str) -> None:
        if name == "copy":
            target.copy_(source)
        else:
            job.run(backends[name])

    def time_s(name: str, _: int) -> Row:
        return {"s": stopwatch.time_s(lambda: run(name), settings.calls)}

    run("copy")  # allocates the copy's memory, as the checks above did for the others
    found = take_turns(["copy", *backends], settings.rounds, time_s)
    times = {name: statistics.median(row["s"] for row in rows) for name, rows in found.items()}
    return {
        "backend": backend.name,
        "is_equal_to_host": is_equal,
        "median_s": times,
        **figures(times, job.about, backend.name, device),
    }


def figures(times: Mapping[str, float], about: Row, name: str, device: torch.device) -> Row:
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
    title, rows = f"{found['backend']} kernels, the largest tensors", found["rows"]
    there = measured(rows)
    largest = max((row["numel"] for row in there.values()), default=0)
    of_largest = {name: row for name, row in there.items() if row["numel"] == largest}

    def microseconds(row: Row) -> float:
        return float(row["median_s"][row["backend"]]) / US

    columns = (
        Column("µs", microseconds, ".1f"),
        Column("GB/s", "bytes_per_s", ".0f", 1e9),
        Column("of copy", "share", ".2f"),
        Column("torch / it", "times_torch", ".1f"),
        Column("bar", "is_met"),
    )
    left_out = {name: row for name, row in rows.items() if name not in there}
    caption = f"bar: {BAR} of copy bandwidth from {BAR_NUMEL // MI} Mi elements on"
    return Section(title, {**of_largest, **left_out}, columns, caption, "operation")


PART = Part("quantizers", "Triton's quantizer kernels against copy bandwidth", 3.0, _run, _section)
