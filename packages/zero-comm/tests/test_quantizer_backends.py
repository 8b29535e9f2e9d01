"""Every backend that is there gives the bytes and values of plain torch, and can be asked for."""

import os
import sys
from pathlib import Path

import pytest
import torch
from forced_backend import HAS_NATIVE, ISAS, forced
from hypothesis import given, settings
from hypothesis import strategies as st
from quantizer_cases import formats as all_formats
from quantizer_cases import group_differences
from quantizer_reference import ALL_DTYPES, Format
from quantizer_strategies import flat_tensors, formats
from real_ranks import start_ranks
from torch import Tensor

import zero_comm
from zero_comm import (
    BlockFormat,
    dequantize,
    dequantize_rows,
    dequantize_sum,
    quantize_rows,
    quantized_nbytes,
)
from zero_comm.quantizer.backend import find_backend

if HAS_NATIVE:
    from zero_comm import _kernels
    from zero_comm.quantizer.native_backend import use_isa

needs_native = pytest.mark.skipif(not HAS_NATIVE, reason="the compiled module isn't there")
seeds = st.one_of(st.none(), st.integers(0, 2**32 - 1))


def made(fmt: Format) -> BlockFormat:
    return BlockFormat(fmt.kind, fmt.block_size, fmt.is_symmetric, fmt.has_rotation)


def outcome(x: Tensor, fmt: BlockFormat, seed: int | None) -> list[Tensor | bool | None]:
    """Bytes, values in every dtype and sums of two rows that hold ``x`` and its negative half."""
    both = torch.cat([x, x * -0.5])
    rows = torch.full((2, 32 + quantized_nbytes(len(x), fmt)), 99, dtype=torch.uint8)
    is_bad = quantize_rows(both, fmt, rows[:, 32:], seed=seed)
    found: list[Tensor | bool | None] = [is_bad, rows.clone()]
    for dtype in ALL_DTYPES:
        out = torch.full((len(both),), 7, dtype=dtype)
        dequantize_rows(rows[:, 32:], len(x), fmt, out)
        found.append(out)
    total = torch.full((len(x),), 7.0)
    dequantize_sum(rows[:, 32:], len(x), fmt, total)
    return [*found, total]


def assert_same(got: list[Tensor | bool | None], expected: list[Tensor | bool | None]) -> None:
    assert got[0] is expected[0]
    for a, b in zip(got[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@given(flat_tensors, formats, seeds)
def test_native_gives_what_torch_gives(isa: str, x: Tensor, fmt: Format, seed: int | None) -> None:
    with forced("torch"):
        expected = outcome(x, made(fmt), seed)
    with forced("native"), use_isa(isa):
        assert_same(outcome(x, made(fmt), seed), expected)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=40)
@given(flat_tensors, formats, seeds, st.data())
def test_native_carries_what_torch_carries(
    isa: str, x: Tensor, fmt: Format, seed: int | None, data: st.DataObject
) -> None:
    if not len(x):
        return
    at = data.draw(st.integers(0, len(x) - 1))
    x[at] = data.draw(st.sampled_from([float("nan"), float("inf"), float("-inf")]))
    with forced("torch"):
        expected = outcome(x, made(fmt), seed)
    assert expected[0] is True
    with forced("native"), use_isa(isa):
        assert_same(outcome(x, made(fmt), seed), expected)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("kind", ["int8", "int4", "e4m3", "e5m2"])
def test_any_bytes_mean_the_same_to_native(isa: str, dtype: torch.dtype, kind: str) -> None:
    """Corrupt ones too: every code, and scales that no quantizer makes."""
    generator = torch.Generator().manual_seed(0)
    for is_symmetric in (True, False) if kind.startswith("int") else (True,):
        fmt = BlockFormat(kind, 256, is_symmetric)
        buffer = torch.randint(
            0, 256, (quantized_nbytes(256 * 65, fmt),), dtype=torch.uint8, generator=generator
        )
        buffer[:256] = torch.arange(256)
        values = []
        for name in ("torch", "native"):
            with forced(name), use_isa(isa):
                values.append(dequantize(buffer, 256 * 65, fmt, dtype=dtype))
        torch.testing.assert_close(values[0], values[1], rtol=0, atol=0, equal_nan=True)


@needs_native
@pytest.mark.parametrize("numel", [1 << 20, (1 << 21) + 77])
def test_threads_do_not_show_in_the_bytes(numel: int) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).bfloat16()
    x[-5] = float("nan")
    before = torch.get_num_threads()
    found = []
    try:
        with forced("native"):
            for num_threads in (1, 3):
                torch.set_num_threads(num_threads)
                found.append(outcome(x, BlockFormat("int4", 128), 5))
    finally:
        torch.set_num_threads(before)
    assert found[0][0] is True
    assert_same(found[1], found[0])


@needs_native
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_large_tensors_are_the_same_in_both(dtype: torch.dtype) -> None:
    x = torch.randn((1 << 19) + 77, generator=torch.Generator().manual_seed(0)).to(dtype)
    for fmt in (BlockFormat("int8", 256), BlockFormat("int4", 128, has_rotation=True)):
        with forced("torch"):
            expected = outcome(x, fmt, None)
        with forced("native"):
            assert_same(outcome(x, fmt, None), expected)


def test_the_host_is_served_by_the_compiled_module_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ZERO_COMM_BACKEND", raising=False)
    assert zero_comm.backend() == ("native" if HAS_NATIVE else "torch")
    assert zero_comm.backend("cpu") == zero_comm.backend(torch.device("cpu"))


def test_devices_that_triton_does_not_support_are_served_by_plain_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ZERO_COMM_BACKEND", raising=False)
    assert zero_comm.backend("mps") == "torch"


def test_a_backend_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERO_COMM_BACKEND", " Torch ")
    assert zero_comm.backend() == "torch"
    assert zero_comm.backend("meta") == "torch"


def test_a_backend_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERO_COMM_BACKEND", "fpga")
    with pytest.raises(ValueError, match=r"one of torch, native, triton, got 'fpga'"):
        zero_comm.quantize(torch.zeros(8))


def test_a_forced_backend_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys.modules["zero_comm.quantizer.backend"], "_is_available", lambda _: False
    )
    monkeypatch.setenv("ZERO_COMM_BACKEND", "native")
    with pytest.raises(ValueError, match=r"'native', but the compiled module .* isn't there"):
        zero_comm.backend()


def quantize_with_isa(rank: int, isa: str, folder: str) -> None:
    os.environ |= {"ZERO_COMM_ISA": isa, "ZERO_COMM_BACKEND": "native"}
    try:
        said = str(zero_comm.quantize(torch.ones(8)).sum().item())
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
    monkeypatch.setattr(_kernels, "available_isas", lambda: ["generic"])
    with pytest.raises(ValueError, match="not supported by this machine"), use_isa("avx512"):
        pass


@pytest.mark.parametrize("name", ["torch", pytest.param("native", marks=needs_native)])
def test_rows_in_groups_are_quantized_as_each_group_by_itself(name: str) -> None:
    with forced(name):
        backend = find_backend(torch.device("cpu"))
    cpu = torch.device("cpu")
    assert [wrong for fmt in all_formats() for wrong in group_differences(fmt, backend, cpu)] == []
