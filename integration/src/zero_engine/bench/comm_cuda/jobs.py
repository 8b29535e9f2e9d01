"""What is timed: an operation on data whose result is known.

The tensors repeat one pattern, a whole number of blocks long. Blocks don't affect each other, so
the result is the pattern's, repeated; the host computes that once, whatever the size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_comm import BlockFormat
from zero_comm.backend import Backend
from zero_comm.reference import TorchBackend
from zero_engine.bench.comm_cuda.settings import DTYPES, Settings

__all__ = ["Job", "jobs"]

_HOST = TorchBackend()


@dataclass(frozen=True)
class Job:
    """One operation on tensors of one size."""

    operation: str
    kind: str
    dtype: str
    numel: int
    moved_bytes: int
    """Read and written, at the least."""
    run: Callable[[Backend], None]
    spoil: Callable[[], object]
    """Overwrites the last run's result."""
    is_right: Callable[[], bool]
    """Whether the last run's result is the host's; waits for the device."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.operation} {self.kind} {self.dtype} {self.numel}"


def jobs(settings: Settings, device: torch.device) -> Iterator[Job]:
    """All jobs, each made when it is asked for: all of them at a time would fill the device."""
    for kind in settings.kinds:
        fmt = BlockFormat.make(kind)
        for dtype in DTYPES:
            for numel in settings.numels:
                pattern = _pattern(1, settings.pattern_numel).to(DTYPES[dtype])
                yield _encode(fmt, dtype, numel, pattern, device)
                yield _decode(fmt, dtype, numel, pattern, device)
        for numel in settings.numels:
            pattern = _pattern(settings.sum_rows, settings.pattern_numel)
            yield _decode_sum(fmt, numel, pattern, device)


def _pattern(num_rows: int, numel: int) -> Tensor:
    """Values with runs of many magnitudes, fp32 on the host."""
    generator = torch.Generator().manual_seed(numel + num_rows)
    x = torch.randn(num_rows, numel, generator=generator)
    runs = torch.randint(-20, 5, (num_rows, numel // 32), generator=generator)
    return x * torch.exp2(runs.float()).repeat_interleave(32, 1)


def _encoded(pattern: Tensor, fmt: BlockFormat) -> Tensor:
    rows = torch.empty(len(pattern), fmt.nbytes(pattern.shape[1]), dtype=torch.uint8)
    _HOST.encode(pattern, rows, fmt, None)
    return rows


def _repeated_rows(pattern: Tensor, numel: int, fmt: BlockFormat, device: torch.device) -> Tensor:
    """The quantized rows of ``pattern`` repeated up to ``numel`` elements each."""
    part = pattern.shape[1]
    rows = _encoded(pattern, fmt)
    codes, scales = _parts(rows, part, fmt)
    whole = torch.zeros(len(rows), fmt.nbytes(numel), dtype=torch.uint8, device=device)
    for target, source in zip(_parts(whole, numel, fmt), (codes, scales), strict=True):
        there = source.to(device)
        target.view(len(rows), numel // part, -1).copy_(there[:, None, :])
    return whole


def _parts(rows: Tensor, numel: int, fmt: BlockFormat) -> tuple[Tensor, Tensor]:
    """The bytes of the codes and those of the scales."""
    start, stop = fmt.codes_nbytes(numel), fmt.used_nbytes(numel)
    return rows[:, :start], rows[:, start:stop]


def _encode(fmt: BlockFormat, dtype: str, numel: int, pattern: Tensor, device: torch.device) -> Job:
    x = pattern.to(device).repeat(1, numel // pattern.shape[1])
    out = torch.empty(1, fmt.nbytes(numel), dtype=torch.uint8, device=device)
    return Job(
        "encode",
        fmt.kind,
        dtype,
        numel,
        moved_bytes=x.nbytes + out.nbytes,
        run=lambda backend: _discard(backend.encode(x, out, fmt, None)),
        spoil=lambda: out.fill_(0xA5),
        is_right=lambda: torch.equal(out, _repeated_rows(pattern, numel, fmt, device)),
    )


def _decode(fmt: BlockFormat, dtype: str, numel: int, pattern: Tensor, device: torch.device) -> Job:
    rows = _repeated_rows(pattern, numel, fmt, device)
    out = torch.empty(1, numel, dtype=DTYPES[dtype], device=device)
    expected = torch.empty_like(pattern)
    _HOST.decode(_encoded(pattern, fmt), expected, fmt)
    return Job(
        "decode",
        fmt.kind,
        dtype,
        numel,
        moved_bytes=rows.nbytes + out.nbytes,
        run=lambda backend: backend.decode(rows, out, fmt),
        spoil=lambda: out.fill_(-77),
        is_right=lambda: _repeats(out[0], expected[0]),
    )


def _decode_sum(fmt: BlockFormat, numel: int, pattern: Tensor, device: torch.device) -> Job:
    rows = _repeated_rows(pattern, numel, fmt, device)
    out = torch.empty(numel, device=device)
    expected = torch.empty(pattern.shape[1])
    _HOST.decode_sum(_encoded(pattern, fmt), expected, fmt)
    return Job(
        f"decode_sum of {len(rows)}",
        fmt.kind,
        "fp32",
        numel,
        moved_bytes=rows.nbytes + out.nbytes,
        run=lambda backend: backend.decode_sum(rows, out, fmt),
        spoil=lambda: out.fill_(-77),
        is_right=lambda: _repeats(out, expected),
    )


def _repeats(values: Tensor, pattern: Tensor) -> bool:
    """Whether finite ``values`` are ``pattern`` over and over, zeros' signs left aside."""
    return bool((values.view(-1, len(pattern)) == pattern.to(values.device)).all())


def _discard(_: object) -> None:
    """What encoding says of non-finite values."""
