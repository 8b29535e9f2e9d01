"""A table of rows to quantize, for backends that are held against plain torch.

All formats, each in every dtype; lengths, seeds and non-finite values take turns.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_comm import BlockFormat
from zero_comm.quantizer.backend import Backend
from zero_comm.quantizer.block_format import seed_of_group
from zero_comm.quantizer.torch_backend import TorchBackend

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
GAP = 16  # bytes between rows, which belong to someone else
REFERENCE = TorchBackend()


@dataclass(frozen=True)
class Case:
    """Rows to quantize."""

    fmt: BlockFormat
    dtype: torch.dtype
    num_rows: int
    numel: int
    seed: int | None
    is_finite: bool

    def rows(self) -> Tensor:
        """Magnitudes far apart, signed zeros, and NaN and Inf in some blocks if asked for."""
        generator = torch.Generator().manual_seed(self.numel + self.num_rows)
        x = torch.randn(self.num_rows, self.numel, generator=generator, dtype=torch.float64)
        low = -24 if self.dtype == torch.float16 else -135
        runs = torch.randint(low, 12, (self.num_rows, -(-self.numel // 8)), generator=generator)
        x *= torch.exp2(runs.double()).repeat_interleave(8, 1)[:, : self.numel]
        x[torch.rand(x.shape, generator=generator) < 0.1] = 0.0
        x[torch.rand(x.shape, generator=generator) < 0.05] *= -0.0
        if not self.fmt.is_symmetric:
            self._make_close(x[0] if self.fmt.block_size == 24 else x[0, :128], generator)
        if not self.is_finite:
            x[0, self.numel // 2] = float("nan")
            x[-1, self.numel // 3] = float("inf")
            x[-1, -1] = -float("inf")
        return x.to(self.dtype)

    def _make_close(self, part: Tensor, generator: torch.Generator) -> None:
        """What came out of the quantizer, a spacing per step: there, codes are moved to fit."""
        spacing = torch.finfo(self.dtype if self.dtype != torch.float64 else torch.float32).eps
        around_one = torch.rand(part.shape, generator=generator, dtype=torch.float64) - 0.5
        x = (1 + 0.95 * self.fmt.top_index * spacing * around_one).to(self.dtype).view(1, -1)
        rows = torch.empty(1, self.fmt.nbytes(x.numel()), dtype=torch.uint8)
        REFERENCE.encode(x, rows, self.fmt, None)
        REFERENCE.decode(rows, x, self.fmt)
        part.copy_(x[0])


def formats() -> Iterator[BlockFormat]:
    """Every kind with and without symmetry and rotation; a power of two and another size."""
    for kind in ("int8", "int4", "e4m3", "e5m2"):
        for is_symmetric in (True, False) if kind.startswith("int") else (True,):
            for block_size in (24, 128):
                yield BlockFormat(kind, block_size, is_symmetric)
            for block_size in (64, 192):
                yield BlockFormat(kind, block_size, is_symmetric, True)


def name_of(fmt: BlockFormat) -> str:
    """Kind, symmetry and rotation; not the block size."""
    symmetry = "symmetric" if fmt.is_symmetric else "asymmetric"
    return f"{fmt.kind} {symmetry}{' rotated' if fmt.has_rotation else ''}"


def cases() -> Iterator[Case]:
    """Each kind, symmetry and rotation in each dtype of the kernels, and int8 in fp64."""
    index = 0
    for fmt in formats():
        has_float64 = fmt.kind == "int8"  # it becomes fp32 before any kernel
        wide = DTYPES[2:] if has_float64 else DTYPES[2:3]
        for dtype in DTYPES[:2] if fmt.block_size in (24, 192) else wide:
            # These periods differ, so that over all formats each setting meets each.
            numel = (517, 256, 1, 1000, 64)[index % 5]
            seed = (None, None, 3_000_000_019)[index % 3]
            yield Case(fmt, dtype, (2, 1, 3, 1)[index // 2 % 4], numel, seed, index % 7 != 0)
            index += 1


def long_cases() -> Iterator[Case]:
    """Several tiles of a kernel that handles some thousand elements at a time."""
    for index, kind in enumerate(("int8", "int4", "e4m3", "e5m2")):
        fmt = BlockFormat(kind, 128, kind != "int8")
        yield Case(fmt, torch.bfloat16, 2, 9000 - index, 7 if index % 2 else None, index != 1)


def differences(case: Case, backend: Backend, device: torch.device) -> list[str]:
    """What ``backend`` does otherwise than plain torch on a CPU does: one line each."""
    x, fmt = case.rows(), case.fmt
    nbytes = fmt.nbytes(case.numel)
    expected = torch.full((case.num_rows, GAP + nbytes + GAP), 7, dtype=torch.uint8)
    found = expected.to(device, copy=True)
    REFERENCE.encode(x, expected[:, GAP : GAP + nbytes], fmt, case.seed)
    is_known = backend.encode(x.to(device, copy=True), found[:, GAP : GAP + nbytes], fmt, case.seed)
    wrong = []
    if is_known is not None and is_known == case.is_finite:
        wrong.append(f"{case}: non-finite values: said {is_known}")
    num_wrong = int((found.cpu() != expected).sum())
    if num_wrong:
        wrong.append(f"{case}: {num_wrong} of {expected.numel()} bytes")
    return wrong + value_differences(expected[:, GAP : GAP + nbytes], case, backend, device)


def value_differences(
    rows: Tensor, case: Case, backend: Backend, device: torch.device
) -> list[str]:
    """The same for decoding ``rows``, a view of a wider buffer, and for adding them up."""
    there = rows.to(device, copy=True)
    values = torch.full((case.num_rows, case.numel), 5.0, dtype=case.dtype)
    total = torch.full((case.numel,), 5.0)
    its_values, its_total = values.to(device, copy=True), total.to(device)
    REFERENCE.decode(rows, values, case.fmt)
    REFERENCE.decode_sum(rows, total, case.fmt)
    backend.decode(there, its_values, case.fmt)
    backend.decode_sum(there, its_total, case.fmt)
    wrong = []
    if not is_same(its_values.cpu(), values):
        wrong.append(f"{case}: values")
    if not is_same(its_total.cpu(), total):
        wrong.append(f"{case}: sum")
    return wrong


def group_differences(fmt: BlockFormat, backend: Backend, device: torch.device) -> list[str]:
    """What ``backend`` does otherwise with rows in groups than with each group by itself."""
    num_groups, num_rows, numel, seed = 3, 2, 301, 3_000_000_019
    x = Case(fmt, torch.float32, num_groups * num_rows, numel, seed, True).rows()
    x = x.to(device).view(num_groups, num_rows, numel)
    # As in an all-to-all: the messages to one rank are adjacent, those of a group are not.
    shape = (num_rows, num_groups, fmt.nbytes(numel))
    rows = torch.full(shape, 7, dtype=torch.uint8, device=device).transpose(0, 1)
    expected = torch.full_like(rows, 7)
    backend.encode(x.view(-1, numel), rows, fmt, seed)
    for group in range(num_groups):
        backend.encode(x[group], expected[group], fmt, seed_of_group(seed, group))
    wrong = [] if torch.equal(rows, expected) else [f"{fmt}: bytes of groups"]
    values, own_values = torch.empty_like(x), torch.empty_like(x)
    totals, own_totals = torch.empty_like(x[:, 0]), torch.empty_like(x[:, 0])
    backend.decode(rows, values.view(-1, numel), fmt)
    backend.decode_sum(rows, totals, fmt)
    for group in range(num_groups):
        backend.decode(rows[group], own_values[group], fmt)
        backend.decode_sum(rows[group], own_totals[group], fmt)
    wrong += [] if torch.equal(values, own_values) else [f"{fmt}: values of groups"]
    return wrong + ([] if torch.equal(totals, own_totals) else [f"{fmt}: sums of groups"])


def is_same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, but for NaN, which has many."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    is_equal = (a.view(integers) == b.view(integers)) | (a.isnan() & b.isnan())
    return bool(is_equal.all())


def all_bytes(fmt: BlockFormat) -> tuple[Tensor, Case]:
    """A row whose codes are all 256 bytes, and what it is a case of; its scales are good."""
    numel = 2 * 256 if fmt.kind == "int4" else 256
    x = torch.linspace(-3, 5, numel)
    case = Case(fmt, torch.float32, 1, numel, None, True)
    row = torch.zeros(1, fmt.nbytes(numel), dtype=torch.uint8)
    REFERENCE.encode(x.view(1, numel), row, fmt, None)
    row[0, :256] = torch.arange(256, dtype=torch.uint8)
    return row, case


def extreme_blocks(fmt: BlockFormat) -> tuple[Tensor, Case]:
    """Two rows: from end to end of what fp32 holds, and a range of about the smallest step."""
    numel = 2 * fmt.block_size
    ends = torch.linspace(-1, 1, numel)
    x = torch.stack([ends * 3e38, ends * 2.0**-104])
    rows = torch.zeros(2, fmt.nbytes(numel), dtype=torch.uint8)
    REFERENCE.encode(x, rows, fmt, None)
    return rows, Case(fmt, torch.float32, 2, numel, None, True)
