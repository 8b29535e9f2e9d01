"""Equality of every available backend with plain torch, byte by byte, and backend selection."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.backends import (
    CPU,
    DEVICE,
    HAS_NATIVE,
    HOSTS,
    ISAS,
    Target,
    every_device,
    every_target,
    needs_native,
)
from support.quantizer_strategies import ALL_DTYPES
from support.real_ranks import start_ranks
from torch import Tensor

import zero_comm
from zero_comm import BlockFormat, dequantize_sum, quantize, quantize_rows
from zero_comm.quantizer.backend import find_backend
from zero_comm.quantizer.block_format import seed_of_group
from zero_comm.quantizer.torch_backend import BACKEND as REFERENCE

KINDS = ("int8", "int4", "e4m3", "e5m2")
GAP = 16  # bytes between rows, which must not change


def name_of(fmt: BlockFormat) -> str:
    """Return the kind, symmetry and rotation of a format, without its block size."""
    symmetry = "symmetric" if fmt.is_symmetric else "asymmetric"
    return f"{fmt.kind} {symmetry}{' rotated' if fmt.has_rotation else ''}"


# Every kind, symmetry and rotation, each with a power of two and another block size.
FORMATS = [
    BlockFormat(kind, block_size, is_symmetric, has_rotation)
    for kind in KINDS
    for is_symmetric in ((True, False) if kind.startswith("int") else (True,))
    for has_rotation, block_sizes in ((False, (24, 128)), (True, (64, 192)))
    for block_size in block_sizes
]


@dataclass(frozen=True)
class Case:
    """Input for which a backend must give the same bytes and values as plain torch on the host."""

    fmt: BlockFormat
    dtype: torch.dtype
    num_rows: int
    numel: int
    seed: int | None
    is_finite: bool

    def rows(self) -> Tensor:
        """Draw very different magnitudes, signed zeros, and optionally some NaN and Inf."""
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
        """Fill ``part`` with dequantized values whose step is about the dtype's spacing.

        A rounded code can then be wrong, and encoders have to correct it.
        """
        spacing = torch.finfo(self.dtype if self.dtype != torch.float64 else torch.float32).eps
        around_one = torch.rand(part.shape, generator=generator, dtype=torch.float64) - 0.5
        x = (1 + 0.95 * self.fmt.top_index * spacing * around_one).to(self.dtype).view(1, -1)
        rows = torch.empty(1, self.fmt.nbytes(x.numel()), dtype=torch.uint8)
        REFERENCE.encode(x, rows, self.fmt, None)
        REFERENCE.decode(rows, x, self.fmt)
        part.copy_(x[0])

    def check(self, device: torch.device) -> None:
        x, nbytes = self.rows(), self.fmt.nbytes(self.numel)
        inner = slice(GAP, GAP + nbytes)
        expected = torch.full((self.num_rows, GAP + nbytes + GAP), 7, dtype=torch.uint8)
        found = expected.to(device, copy=True)
        REFERENCE.encode(x, expected[:, inner], self.fmt, self.seed)
        there = x.to(device, copy=True)
        is_bad = find_backend(device).encode(there, found[:, inner], self.fmt, self.seed)
        assert is_bad is None or is_bad != self.is_finite, self
        assert torch.equal(found.cpu(), expected), self
        self.check_values(expected[:, inner], device)

    def check_values(self, rows: Tensor, device: torch.device) -> None:
        """Check that the device's backend decodes and sums ``rows`` as plain torch does."""
        there, backend = rows.to(device, copy=True), find_backend(device)
        values = torch.full((self.num_rows, self.numel), 5.0, dtype=self.dtype)
        total = torch.full((self.numel,), 5.0)
        its_values, its_total = values.to(device, copy=True), total.to(device, copy=True)
        REFERENCE.decode(rows, values, self.fmt)
        REFERENCE.decode_sum(rows, total, self.fmt)
        backend.decode(there, its_values, self.fmt)
        backend.decode_sum(there, its_total, self.fmt)
        assert is_same(its_values.cpu(), values), self
        assert is_same(its_total.cpu(), total), self


def is_same(a: Tensor, b: Tensor) -> bool:
    """Compare bits, but treat all NaNs as equal."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    is_equal = (a.view(integers) == b.view(integers)) | (a.isnan() & b.isnan())
    return bool(is_equal.all())


def cases() -> Iterator[Case]:
    """Yield cases for each kind, symmetry and rotation in each dtype, and cases with long rows.

    Only int8 is tested with fp64.
    """
    index = 0
    for fmt in FORMATS:
        has_float64 = fmt.kind == "int8"  # fp64 is converted to fp32 before any kernel
        wide = (torch.float16, torch.float64) if has_float64 else (torch.float16,)
        for dtype in ALL_DTYPES[:2] if fmt.block_size in (24, 192) else wide:
            # Settings cycle with different periods, so that their combinations vary.
            numel = (517, 256, 1, 1000, 64)[index % 5]
            seed = (None, None, 3_000_000_019)[index % 3]
            yield Case(fmt, dtype, (2, 1, 3, 1)[index // 2 % 4], numel, seed, index % 7 != 0)
            index += 1
    for index, kind in enumerate(KINDS):  # rows longer than a tile of the Triton kernel
        fmt, seed = BlockFormat(kind, 128, kind != "int8"), 7 if index % 2 else None
        yield Case(fmt, torch.bfloat16, 2, 5000 - index, seed, index != 1)


def check_rows_of_all_bytes(fmt: BlockFormat, device: torch.device) -> None:
    """Check the decoding of all 256 code bytes, with valid scales."""
    numel = 512 if fmt.kind == "int4" else 256
    row = torch.zeros(1, fmt.nbytes(numel), dtype=torch.uint8)
    REFERENCE.encode(torch.linspace(-3, 5, numel).view(1, numel), row, fmt, None)
    row[0, :256] = torch.arange(256, dtype=torch.uint8)
    Case(fmt, torch.float32, 1, numel, None, True).check_values(row, device)


def check_extreme_rows(fmt: BlockFormat, device: torch.device) -> None:
    """Check a row with nearly all of fp32's range, and a row with about the smallest step."""
    numel = 2 * fmt.block_size
    ends = torch.linspace(-1, 1, numel)
    rows = torch.zeros(2, fmt.nbytes(numel), dtype=torch.uint8)
    REFERENCE.encode(torch.stack([ends * 3e38, ends * 2.0**-104]), rows, fmt, None)
    Case(fmt, torch.float32, 2, numel, None, True).check_values(rows, device)


def check_groups(fmt: BlockFormat, device: torch.device) -> None:
    """Check that rows in groups are quantized like each group alone."""
    backend = find_backend(device)
    num_groups, num_rows, numel, seed = 3, 2, 301, 3_000_000_019
    x = Case(fmt, torch.float32, num_groups * num_rows, numel, seed, True).rows()
    x = x.to(device).view(num_groups, num_rows, numel)
    # As in an all-to-all, rows of one receiver are adjacent, and rows of one group are not.
    shape = (num_rows, num_groups, fmt.nbytes(numel))
    rows = torch.full(shape, 7, dtype=torch.uint8, device=device).transpose(0, 1)
    expected = torch.full_like(rows, 7)
    values, own_values = torch.empty_like(x), torch.empty_like(x)
    totals, own_totals = torch.empty_like(x[:, 0]), torch.empty_like(x[:, 0])
    backend.encode(x.view(-1, numel), rows, fmt, seed)
    backend.decode(rows, values.view(-1, numel), fmt)
    backend.decode_sum(rows, totals, fmt)
    for group in range(num_groups):
        backend.encode(x[group], expected[group], fmt, seed_of_group(seed, group))
        backend.decode(rows[group], own_values[group], fmt)
        backend.decode_sum(rows[group], own_totals[group], fmt)
    assert torch.equal(rows, expected), fmt
    assert torch.equal(values, own_values), fmt
    assert torch.equal(totals, own_totals), fmt


@every_target
@pytest.mark.parametrize("name", sorted({name_of(fmt) for fmt in FORMATS}))
def test_rows_have_the_bytes_and_values_of_plain_torch(target: Target, name: str) -> None:
    with target.forced():
        assert find_backend(target.device).name == target.name
        for case in cases():
            if name_of(case.fmt) == name:
                case.check(target.device)
        for fmt in FORMATS:
            if name_of(fmt) == name and fmt.block_size == 128:
                check_rows_of_all_bytes(fmt, target.device)
                check_extreme_rows(fmt, target.device)
            # Interpreted kernels are slow, so each kind tests groups with one size only.
            is_chosen = fmt.block_size == (64 if fmt.kind in ("int4", "e5m2") else 128)
            is_chosen &= fmt.kind.startswith("e") or not fmt.is_symmetric
            if name_of(fmt) == name and (is_chosen or not target.is_interpreted):
                check_groups(fmt, target.device)


@every_target
def test_no_rows_and_rows_of_no_elements_are_left_alone(target: Target) -> None:
    fmt = BlockFormat("int8", 256)
    with target.forced():
        backend = find_backend(target.device)
        for x in (torch.empty(2, 0), torch.empty(0, 5)):
            rows = torch.empty(len(x), fmt.nbytes(x.shape[1]), dtype=torch.uint8)
            backend.encode(x.to(target.device), rows.to(target.device), fmt, None)
            backend.decode(rows.to(target.device), x.to(target.device), fmt)
        nothing = torch.empty(0, device=target.device)
        backend.decode_sum(nothing.byte().view(2, 0), nothing, fmt)


@needs_native
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_large_tensors_are_those_of_torch_with_any_number_of_threads(dtype: torch.dtype) -> None:
    numel = (1 << 20) + 77
    before = torch.get_num_threads()
    torch.set_num_threads(1 if dtype == torch.float16 else 3)
    try:
        fmt = BlockFormat("int4", 128, has_rotation=dtype == torch.float32)
        seed = 5 if dtype == torch.bfloat16 else None
        with Target("native").forced():
            Case(fmt, dtype, 2, numel, seed, dtype != torch.bfloat16).check(CPU)
    finally:
        torch.set_num_threads(before)


@every_device
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_millions_of_elements_on_a_device_give_the_bytes_of_the_host(
    target: Target, kind: str, dtype: torch.dtype
) -> None:
    with target.forced():
        Case(BlockFormat.make(kind), dtype, 3, (1 << 20) + 77, 5, True).check(target.device)


@pytest.mark.skipif(DEVICE is None, reason="torch finds no accelerator")
def test_quantizing_waits_for_nothing_on_the_device() -> None:
    # Kernels run on the current stream, so later work there needs no host synchronization.
    fmt, numel = BlockFormat.make("int4"), 1 << 16
    x = torch.ones(2 * numel, device=DEVICE)
    rows = torch.empty(2, fmt.nbytes(numel), dtype=torch.uint8, device=DEVICE)
    total = torch.empty(numel, device=DEVICE)
    stream = torch.Stream(DEVICE)
    stream.wait_stream(torch.accelerator.current_stream())  # the current stream fills x
    with stream:
        x.mul_(3)
        assert quantize_rows(x, fmt, rows) is None
        dequantize_sum(rows, numel, fmt, total)
    torch.accelerator.current_stream().wait_stream(stream)  # ``stream`` fills total
    assert torch.equal(total.cpu(), torch.full((numel,), 6.0))


@pytest.mark.skipif(DEVICE is None, reason="torch finds no accelerator")
def test_non_finite_values_on_a_device_are_refused_when_asked_to() -> None:
    x = torch.ones(1000, device=DEVICE)
    x[700] = float("inf")
    with pytest.raises(ValueError, match=r"the first among elements \[512, 768\)"):
        quantize(x, nonfinite="refuse")


@pytest.mark.skipif(Target("triton") not in HOSTS, reason="Triton's kernels aren't interpreted")
def test_a_block_that_no_program_can_hold_is_refused_with_what_to_do() -> None:
    said = r"blocks of up to 32768 elements, got block_size 65536.*ZERO_COMM_BACKEND=torch"
    with Target("triton").forced(), pytest.raises(ValueError, match=said):
        quantize(torch.ones(1), BlockFormat("int8", 1 << 16))


def test_a_device_is_served_by_the_fastest_backend_and_by_the_one_that_is_forced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ZERO_COMM_BACKEND", raising=False)
    assert zero_comm.backend() == ("native" if HAS_NATIVE else "torch")
    assert zero_comm.backend("cpu") == zero_comm.backend(CPU)
    assert zero_comm.backend("mps") == "torch"
    monkeypatch.setenv("ZERO_COMM_BACKEND", " Torch ")
    assert zero_comm.backend() == zero_comm.backend("meta") == "torch"


def test_a_backend_that_does_not_exist_or_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ZERO_COMM_BACKEND", "fpga")
    with pytest.raises(ValueError, match=r"one of torch, native, triton, got 'fpga'"):
        quantize(torch.zeros(8))
    module = sys.modules["zero_comm.quantizer.backend"]
    monkeypatch.setattr(module, "_is_available", lambda _: False)
    monkeypatch.setenv("ZERO_COMM_BACKEND", "native")
    with pytest.raises(ValueError, match=r"'native', but the compiled module .* isn't there"):
        zero_comm.backend()
    module.warn_without_kernels()
    assert "without its compiled kernels" in caplog.text


def quantize_with_isa(rank: int, isa: str, folder: str) -> None:
    os.environ |= {"ZERO_COMM_ISA": isa, "ZERO_COMM_BACKEND": "native"}
    try:
        said = str(quantize(torch.ones(8)).sum().item())
    except ValueError as error:
        said = str(error)
    Path(folder, isa).write_text(said)


@needs_native
def test_the_environment_names_the_instruction_set(tmp_path: Path) -> None:
    for isa in ("generic", "mmx"):
        start_ranks(quantize_with_isa, (isa, str(tmp_path)), 1)
    assert float((tmp_path / "generic").read_text()) > 0
    refusal = (tmp_path / "mmx").read_text()
    assert "ZERO_COMM_ISA='mmx' is no instruction set" in refusal
    assert ", ".join(ISAS) in refusal


@needs_native
def test_an_instruction_set_that_the_machine_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zero_comm._kernels.available_isas", lambda: ["generic"])
    with (
        pytest.raises(ValueError, match="not supported by this machine"),
        Target("native", "avx512").forced(),
    ):
        pass
