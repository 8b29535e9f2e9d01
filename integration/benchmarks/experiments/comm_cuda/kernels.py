"""The timed operations of the block quantizer, on data with known results.

The tensors repeat one pattern, a whole number of blocks long. Blocks don't affect each other, so
the result is the pattern's, repeated; the host computes that once, whatever the size.
"""

from __future__ import annotations

import importlib.util
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from benchmarks.harness.models import find_device
from benchmarks.harness.ranks import Place, Row
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


@dataclass(frozen=True)
class Settings:
    """Kinds and sizes of a measurement."""

    kinds: tuple[str, ...]
    numels: tuple[int, ...]
    """Elements, each a multiple of ``pattern_numel``."""
    pattern_numel: int
    """Elements that a tensor repeats. A multiple of every block size. See `jobs`."""
    rounds: int
    calls: int
    """Calls of each contender in a round, timed together."""
    sum_rows: int = 8


REAL: Final = Settings(KINDS, (MI, 4 * MI, 16 * MI, 64 * MI, 256 * MI), MI, rounds=7, calls=10)
DRY: Final = Settings(KINDS, (1 << 10, 1 << 12), 1 << 10, rounds=1, calls=1)


FIRST_KINDS = ("int8", "int4")
_BUSY_WIDTH = 4096
_HOST = TorchBackend()


@dataclass(frozen=True)
class Operation:
    """One operation on tensors of one size."""

    operation: str
    kind: str
    dtype: str
    numel: int
    moved_bytes: int
    """Read and written, at the least."""
    run: Callable[[Backend], object]
    spoil: Callable[[], object]
    """Overwrites the last run's result."""
    is_right: Callable[[], bool]
    """Whether the last run's result is the host's. Waits for the device."""

    @property
    def name(self) -> str:
        return f"{self.operation} {self.kind} {self.dtype} {self.numel}"


def jobs(settings: Settings, device: torch.device) -> Iterator[Operation]:
    """Yield all operations, each made when it is taken: together they would fill the device."""
    for kind in settings.kinds:
        fmt = BlockFormat.make(kind)
        for dtype in DTYPES:
            for numel in settings.numels:
                pattern = _pattern(1, settings.pattern_numel).to(DTYPES[dtype])
                yield _encode(fmt, dtype, numel, pattern, device)
                yield _decode(fmt, dtype, numel, pattern, device, is_sum=False)
        for numel in settings.numels:
            pattern = _pattern(settings.sum_rows, settings.pattern_numel)
            yield _decode(fmt, "fp32", numel, pattern, device, is_sum=True)


def _pattern(num_rows: int, numel: int) -> Tensor:
    """Return values with runs of many magnitudes, fp32 on the host."""
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
    codes, scales = _parts(rows, part, fmt)
    whole = torch.zeros(len(rows), fmt.nbytes(numel), dtype=torch.uint8, device=device)
    for target, source in zip(_parts(whole, numel, fmt), (codes, scales), strict=True):
        there = source.to(device)
        target.view(len(rows), numel // part, -1).copy_(there[:, None, :])
    return whole


def _parts(rows: Tensor, numel: int, fmt: BlockFormat) -> tuple[Tensor, Tensor]:
    """Return the bytes of the codes and those of the scales."""
    start, stop = fmt.codes_nbytes(numel), fmt.used_nbytes(numel)
    return rows[:, :start], rows[:, start:stop]


def _encode(
    fmt: BlockFormat, dtype: str, numel: int, pattern: Tensor, device: torch.device
) -> Operation:
    x = pattern.to(device).repeat(1, numel // pattern.shape[1])
    out = torch.empty(1, fmt.nbytes(numel), dtype=torch.uint8, device=device)
    return Operation(
        "encode",
        fmt.kind,
        dtype,
        numel,
        moved_bytes=x.nbytes + out.nbytes,
        run=lambda backend: backend.encode(x, out, fmt, None),
        spoil=lambda: out.fill_(0xA5),
        is_right=lambda: torch.equal(out, _repeated_rows(pattern, numel, fmt, device)),
    )


def _decode(
    fmt: BlockFormat,
    dtype: str,
    numel: int,
    pattern: Tensor,
    device: torch.device,
    *,
    is_sum: bool,
) -> Operation:
    def run(backend: Backend, rows: Tensor, out: Tensor) -> None:
        if is_sum:
            backend.decode_sum(rows, out[0], fmt)
        else:
            backend.decode(rows, out, fmt)

    rows = _repeated_rows(pattern, numel, fmt, device)
    out = torch.empty(1, numel, dtype=DTYPES[dtype], device=device)
    expected = torch.empty_like(pattern[:1])
    run(_HOST, _encoded(pattern, fmt), expected)
    return Operation(
        f"decode_sum of {len(rows)}" if is_sum else "decode",
        *(fmt.kind, dtype, numel),
        moved_bytes=rows.nbytes + out.nbytes,
        run=lambda backend: run(backend, rows, out),
        spoil=lambda: out.fill_(-77),
        is_right=lambda: _repeats(out[0], expected[0]),
    )


def _repeats(values: Tensor, pattern: Tensor) -> bool:
    """Return whether finite ``values`` repeat ``pattern``, but for signs of zeros."""
    return bool((values.view(-1, len(pattern)) == pattern.to(values.device)).all())


class Stopwatch:
    """Times calls: by events on an accelerator, by the clock on a CPU.

    A call takes the host longer to start than a small kernel takes to run. So the device is first
    given other work, long enough for the host to start all the calls meanwhile: they then run back
    to back, and the time between the two events is theirs alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._busy: Tensor | None = None
        self._busy_s = 0.0
        if device.type != "cpu":
            self._busy = torch.zeros(_BUSY_WIDTH, _BUSY_WIDTH, dtype=torch.bfloat16, device=device)
            self._keep_busy(3)
            self._busy_s = self._between_events(lambda: self._keep_busy(10)) / 10

    def time_s(self, run: Callable[[], object], calls: int) -> float:
        """Return the seconds per call of ``run``, which was called before."""
        if self._device.type == "cpu":
            started_at = time.perf_counter()
            for _ in range(calls):
                run()
            return (time.perf_counter() - started_at) / calls
        torch.accelerator.synchronize(self._device)
        started_at = time.perf_counter()
        run()
        host_s = calls * (time.perf_counter() - started_at)
        torch.accelerator.synchronize(self._device)
        self._keep_busy(math.ceil(2 * host_s / self._busy_s))

        def run_all() -> None:
            for _ in range(calls):
                run()

        return self._between_events(run_all) / calls

    def _keep_busy(self, times: int) -> None:
        assert self._busy is not None
        for _ in range(times):
            torch.mm(self._busy, self._busy)

    def _between_events(self, run: Callable[[], object]) -> float:
        start, stop = (torch.Event(self._device.type, enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


def medians_s(
    contenders: Mapping[str, Callable[[], object]], stopwatch: Stopwatch, *, rounds: int, calls: int
) -> dict[str, float]:
    """Return median seconds per call of each contender, all in turn in every round."""
    for run in contenders.values():
        run()  # compiles, allocates
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            times[name].append(stopwatch.time_s(run, calls))
    return {name: statistics.median(found) for name, found in times.items()}


class WrongResultError(RuntimeError):
    """The backend gives other bytes or values than the host."""


def measure(
    job: Operation,
    backend: Backend,
    settings: Settings,
    stopwatch: Stopwatch,
    device: torch.device,
) -> Row:
    """Check and time ``backend``, plain torch and a copy of as many bytes.

    Raises:
        WrongResultError: a result differs from the host's.
    """
    backends: dict[str, Backend] = {"torch": TorchBackend(), backend.name: backend}
    is_equal = {name: _is_right(job, contender) for name, contender in backends.items()}
    if not is_equal[backend.name]:
        raise WrongResultError(
            f"{job.name}: the {backend.name} backend on {device} gives another result than torch "
            "on the host: run packages/zero-comm/tests/test_quantizer_on_accelerator.py there"
        )
    source = torch.zeros(job.moved_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    contenders: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        **{name: _runner(job, contender) for name, contender in backends.items()},
    }
    times = medians_s(contenders, stopwatch, rounds=settings.rounds, calls=settings.calls)
    return {
        "operation": job.operation,
        "kind": job.kind,
        "dtype": job.dtype,
        "numel": job.numel,
        "moved_bytes": job.moved_bytes,
        "backend": backend.name,
        "is_equal_to_host": is_equal,
        "median_s": times,
        **_figures(times, job, backend.name, device),
    }


def _figures(
    times: dict[str, float], job: Operation, name: str, device: torch.device
) -> dict[str, float | bool | None]:
    """Return bandwidths and their ratios, null on a CPU."""
    if device.type == "cpu":
        keys = ("bytes_per_s", "copy_bytes_per_s", "share", "times_torch", "is_met")
        return dict.fromkeys(keys)
    share = times["copy"] / times[name]
    return {
        "bytes_per_s": job.moved_bytes / times[name],
        "copy_bytes_per_s": job.moved_bytes / times["copy"],
        "share": share,
        "times_torch": times["torch"] / times[name],
        "is_met": share >= BAR if job.numel >= BAR_NUMEL else None,
    }


def _is_right(job: Operation, backend: Backend) -> bool:
    job.spoil()
    job.run(backend)
    return job.is_right()


def _runner(job: Operation, backend: Backend) -> Callable[[], object]:
    return lambda: job.run(backend)


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

    Sets TRITON_INTERPRET of this process; RuntimeError if triton was imported before.
    """
    if importlib.util.find_spec("triton") is None:
        return TorchBackend()
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before it could be told to interpret")
    os.environ["TRITON_INTERPRET"] = "1"  # triton reads it as it is imported
    from zero_comm.quantizer.triton_backend import BACKEND

    # NumPy, which interprets, warns of overflow that is meant.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
    return BACKEND


def rows(place: Place, size: str, deadline: float) -> Row:
    """Measure all rows in a process of their own. A target of `benchmarks.harness.ranks`.

    The result is written row by row, the kinds and sizes of the bar first.

    Args:
        place: of the process.
        size: "real", on the accelerator, or "dry", on the CPU.
        deadline: a time of `time.time`; rows after it are counted.
    """
    is_dry = size == "dry"
    device = torch.device("cpu") if is_dry else find_device()
    backend = interpreted() if is_dry else on_device(device)
    stopwatch = Stopwatch(device)
    found: Row = {"backend": backend.name, "rows": [], "num_left": 0}
    for settings in _by_interest(DRY if is_dry else REAL):
        for job in jobs(settings, device):
            if time.time() > deadline:
                found["num_left"] += 1
                continue
            try:
                row = measure(job, backend, settings, stopwatch, device)
            except Exception as error:  # a wrong result, a kernel that does not compile: a row
                row = {"name": job.name, "failure": f"{type(error).__name__}: {error}"}
            found["rows"].append(row)
            place.write(found)
    return found


def _by_interest(settings: Settings) -> list[Settings]:
    """Return the settings in parts: kinds and sizes of the bar, other sizes, other kinds."""
    first = tuple(kind for kind in settings.kinds if kind in FIRST_KINDS)
    others = tuple(kind for kind in settings.kinds if kind not in FIRST_KINDS)
    large = tuple(numel for numel in settings.numels if numel >= BAR_NUMEL)
    small = tuple(numel for numel in settings.numels if numel < BAR_NUMEL)
    return [
        replace(settings, kinds=kinds, numels=numels)
        for kinds in (first, others)
        for numels in (large, small)
    ]
