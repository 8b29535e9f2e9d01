"""The quantizer's arguments: shapes, devices, given outputs, refusals."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quantizer_reference import ALL_DTYPES

from zero_comm import (
    DEFAULT_BLOCK_SIZE,
    BlockFormat,
    dequantize,
    dequantize_rows,
    dequantize_sum,
    quantize,
    quantize_rows,
    quantized_nbytes,
)

KINDS = ("int8", "int4", "e4m3", "e5m2")
BOOLS = (False, True)


def test_known_bytes_of_one_8_bit_block() -> None:
    x = torch.tensor([127.0, -127.0, 0.0, 1.0, -1.0, 2.5, 3.5, -0.4])
    buffer = quantize(x, BlockFormat("int8", 8))
    maximum = [0xFE, 0x42]  # bfloat16 127.0, little endian
    assert buffer.tolist() == [127, 129, 0, 1, 255, 2, 4, 0, *maximum, *[0] * 6]
    back = dequantize(buffer, 8, BlockFormat("int8", 8))
    assert back.tolist() == [127.0, -127.0, 0.0, 1.0, -1.0, 2.0, 4.0, 0.0]


def test_known_bytes_of_one_4_bit_block() -> None:
    x = torch.tensor([7.0, -7.0, 0.0, -1.0, 1.0, -1.0, 7.0, -7.0])
    buffer = quantize(x, BlockFormat("int4", 8))
    pairs = [7 + 16 * 1, 256 - 7 - 16, 16 * 7, 256 - 1 - 16 * 7]
    assert buffer.tolist() == [*pairs, 0xE0, 0x40, *[0] * 10]
    assert dequantize(buffer, 8, BlockFormat("int4", 8)).tolist() == x.tolist()


def test_known_bytes_of_one_e4m3_block() -> None:
    x = torch.tensor([448.0, -448.0, 0.0, 1.0, -1.0, 2.0**-9, 2.0**-10, -(2.0**-11)])
    fmt = BlockFormat("e4m3", 8)
    assert quantize(x, fmt).tolist() == [126, 254, 0, 56, 184, 1, 0, 0, 0xE0, 0x43, *[0] * 6]
    assert dequantize(quantize(x, fmt), 8, fmt).tolist() == [*x[:6].tolist(), 0.0, 0.0]


def test_known_bytes_of_one_asymmetric_block() -> None:
    x = torch.tensor([-4.0, 10.0, 0.0, -0.0, -3.0, 9.4, 0.4, 1.0])
    fmt = BlockFormat("int4", 8, is_symmetric=False)  # a step of 1
    codes = [1 + (2 << 4), 15 + (14 << 4), 5 << 4, 6 << 4]
    ends = list(torch.tensor([-4.0, 10.0]).view(torch.uint8))
    assert quantize(x, fmt).tolist() == [*codes, *map(int, ends), 0, 0, 0, 0]
    assert dequantize(quantize(x, fmt), 8, fmt).tolist() == [-4, 10, 0, 0, -3, 9, 0, 1]


def test_a_constant_asymmetric_block_comes_back_exactly() -> None:
    fmt = BlockFormat("int8", 64, is_symmetric=False)
    for value in (0.1, -3e38, 1e-40):
        x = torch.full((100,), value)
        assert torch.equal(dequantize(quantize(x, fmt), 100, fmt), x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("int3", 8), "format must be one of int8, int4, e4m3, e5m2, got 'int3'"),
        (("int8", 0), "block_size must be a positive multiple of 8, got 0"),
        (("int8", -256), "block_size must be"),
        (("int8", 12), "block_size must be"),
        (("int8", 96, True, True), "block_size must be a positive multiple of 64 with a rotation"),
        (("e4m3", 128, False), "is_symmetric must be true for e4m3"),
    ],
)
def test_a_format_that_makes_no_sense_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockFormat(*arguments)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_name_means_the_default_block_size(dtype: torch.dtype, kind: str) -> None:
    x = torch.randn(1000).to(dtype)
    buffer = quantize(x, kind)
    assert torch.equal(buffer, quantize(x, BlockFormat(kind, DEFAULT_BLOCK_SIZE[kind])))
    assert buffer.numel() == quantized_nbytes(1000, kind)


def test_any_shape_is_read_in_flat_order() -> None:
    x = torch.randn(20, 30).t()
    assert torch.equal(quantize(x), quantize(x.contiguous().view(-1)))


def test_parameters_are_quantized_without_a_graph() -> None:
    x = torch.nn.Parameter(torch.randn(300))
    assert not quantize(x).requires_grad
    assert not dequantize(quantize(x), 300).requires_grad


def test_dtypes_are_independent_of_the_buffer() -> None:
    x = torch.randn(300).bfloat16()
    narrow = dequantize(quantize(x), 300, dtype=torch.bfloat16)
    assert torch.equal(dequantize(quantize(x), 300, dtype=torch.float32).bfloat16(), narrow)


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_given_buffers_may_start_at_any_byte(offset: int) -> None:
    x = torch.randn(600).half()
    storage = torch.zeros(quantized_nbytes(600) + 8, dtype=torch.uint8)
    out = storage[offset : offset + quantized_nbytes(600)]
    assert quantize(x, out=out) is out
    assert torch.equal(out, quantize(x))
    values = torch.empty(603, dtype=torch.float16)[offset : offset + 600]
    assert dequantize(out, 600, dtype=torch.float16, out=values) is values
    assert torch.equal(values, dequantize(quantize(x), 600, dtype=torch.float16))
    assert not storage[:offset].any()
    assert not storage[offset + len(out) :].any()


@pytest.mark.parametrize("fmt", [BlockFormat("int4", 128, s, r) for s in BOOLS for r in BOOLS])
def test_input_is_never_changed(fmt: BlockFormat) -> None:
    x = torch.randn(1000)
    kept = x.clone()
    buffer = quantize(x, fmt)
    bytes_kept = buffer.clone()
    dequantize(buffer, 1000, fmt)
    assert torch.equal(x, kept)
    assert torch.equal(buffer, bytes_kept)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_nonfinite_values_are_refused_when_asked(dtype: torch.dtype, value: float) -> None:
    x = torch.zeros(1000, dtype=dtype)
    quantize(x, nonfinite="refuse")
    x[700] = value
    with pytest.raises(ValueError, match=re.escape("1 of 4 blocks, the first among elements [512")):
        quantize(x, nonfinite="refuse")


def test_a_double_out_of_fp32_range_is_not_clipped() -> None:
    x = torch.tensor([1.0, 1e300], dtype=torch.float64)
    assert dequantize(quantize(x), 2, dtype=torch.float64).isnan().all()
    with pytest.raises(ValueError, match="NaN or Inf"):
        quantize(x, nonfinite="refuse")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"format": "int5"}, "format"),
        ({"nonfinite": "clip"}, "nonfinite"),
        ({"out": torch.empty(15, dtype=torch.uint8)}, "out"),
        ({"out": torch.empty(272)}, "out"),
        ({"out": torch.empty(544, dtype=torch.uint8)[::2]}, "out"),
        ({"out": torch.empty(272, dtype=torch.uint8, device="meta")}, "out"),
    ],
)
def test_quantize_names_the_argument_it_refuses(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named} must"):
        quantize(torch.zeros(200), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.complex64, torch.bool])
def test_quantize_refuses_what_is_not_a_float(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"^x must"):
        quantize(torch.zeros(8, dtype=dtype))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"buffer": torch.empty(256, dtype=torch.uint8)}, "buffer"),
        ({"buffer": torch.empty(272)}, "buffer"),
        ({"buffer": torch.empty(2, 136, dtype=torch.uint8)}, "buffer"),
        ({"numel": -1}, "numel"),
        ({"numel": 300}, "buffer"),
        ({"dtype": torch.int8}, "dtype"),
        ({"format": "fp8"}, "format"),
        ({"out": torch.empty(200, dtype=torch.float64)}, "out"),
        ({"out": torch.empty(199)}, "out"),
        ({"out": torch.empty(400)[::2]}, "out"),
        ({"out": torch.empty(200, device="meta")}, "out"),
    ],
)
def test_dequantize_names_the_argument_it_refuses(arguments: dict[str, object], named: str) -> None:
    given: dict[str, object] = {"buffer": quantize(torch.zeros(200)), "numel": 200, **arguments}
    with pytest.raises(ValueError, match=f"^{named} must"):
        dequantize(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [None, 2**32 - 5])
@pytest.mark.parametrize("numel", [0, 1, 300])
def test_each_row_is_its_part_quantized_alone(kind: str, seed: int | None, numel: int) -> None:
    x = torch.randn(3 * numel)
    nbytes = quantized_nbytes(numel, kind)
    messages = torch.full((3, 32 + nbytes), 77, dtype=torch.uint8)
    rows = messages[:, 32:]
    assert quantize_rows(x, kind, rows, seed=seed) is False
    for index in range(3):
        part = x[index * numel : (index + 1) * numel]
        own_seed = None if seed is None else seed + 0x9E3779B9 * index
        assert torch.equal(rows[index], quantize(part, kind, seed=own_seed))
    assert (messages[:, :32] == 77).all()
    back = torch.empty(3 * numel, dtype=torch.bfloat16)
    dequantize_rows(rows, numel, kind, back)
    alone = [dequantize(row.clone(), numel, kind, dtype=torch.bfloat16) for row in rows]
    assert torch.equal(back, torch.cat(alone))


@pytest.mark.parametrize("fmt", [BlockFormat("int4", 128, s, r) for s in BOOLS for r in BOOLS])
@pytest.mark.parametrize("numel", [0, 1, 128, 1000])
def test_rows_are_summed_from_left_to_right(fmt: BlockFormat, numel: int) -> None:
    # Each row of another magnitude: another order, or another precision, gives another sum.
    parts = [torch.randn(numel) * 10.0**i for i in (0, 3, -2, 3)]
    rows = torch.stack([quantize(part, fmt) for part in parts])
    total = torch.empty(numel)
    dequantize_sum(rows, numel, fmt, total)
    expected = torch.zeros(numel)
    for row in rows:
        expected += dequantize(row.clone(), numel, fmt)
    assert torch.equal(total, expected)


def test_rows_tell_of_a_nonfinite_value() -> None:
    x = torch.zeros(600)
    rows = torch.empty(2, quantized_nbytes(300), dtype=torch.uint8)
    assert quantize_rows(x, "int8", rows) is False
    x[-1] = float("inf")
    assert quantize_rows(x, "int8", rows) is True
    back = torch.empty(600)
    dequantize_rows(rows, 300, "int8", back)
    assert back.isnan().sum() == 300 - 256


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"x": torch.zeros(10, 20)}, "x"),
        ({"x": torch.zeros(401)}, "x"),
        ({"x": torch.zeros(400, dtype=torch.int32)}, "x"),
        ({"format": "int"}, "format"),
        ({"out": torch.empty(2, 256, dtype=torch.uint8)}, "out"),
        ({"out": torch.empty(2, 273, dtype=torch.uint8)[:, 1:]}, "out"),
        ({"out": torch.empty(272, 2, dtype=torch.uint8).t()}, "out"),
        ({"out": torch.empty(544, dtype=torch.uint8)}, "out"),
        ({"out": torch.empty(2, 272)}, "out"),
        ({"out": torch.empty(1, 272, dtype=torch.uint8).expand(2, 272)}, "out"),
        ({"out": torch.empty(2, 272, dtype=torch.uint8, device="meta")}, "out"),
    ],
)
def test_quantize_rows_names_the_argument_it_refuses(arguments: dict[str, Any], named: str) -> None:
    given: dict[str, Any] = {"x": torch.zeros(400), "format": "int8"}
    given["out"] = torch.empty(2, 272, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"^{named} must"):
        quantize_rows(**{**given, **arguments})


@pytest.mark.parametrize("read", [dequantize_rows, dequantize_sum])
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"rows": torch.empty(2, 256, dtype=torch.uint8)}, "rows"),
        ({"rows": torch.empty(272, dtype=torch.uint8)}, "rows"),
        ({"numel": -1}, "numel"),
        ({"format": "int"}, "format"),
        ({"out": torch.empty(300)}, "out"),
        ({"out": torch.empty(800)[::2]}, "out"),
        ({"out": torch.empty(400, dtype=torch.int32)}, "out"),
        ({"out": torch.empty(400, device="meta")}, "rows"),
    ],
)
def test_reading_rows_names_the_argument_it_refuses(
    read: Callable[..., None], arguments: dict[str, Any], named: str
) -> None:
    given: dict[str, Any] = {"numel": 200, "format": "int8"}
    given["rows"] = torch.empty(2, 272, dtype=torch.uint8)
    given["out"] = torch.empty(400 if read is dequantize_rows else 200)
    with pytest.raises(ValueError, match=f"^{named} must"):
        read(**{**given, **arguments})


def test_a_sum_of_no_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^rows must"):
        dequantize_sum(torch.empty(0, 272, dtype=torch.uint8), 200, "int8", torch.empty(200))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_a_cuda_device_gives_the_same_bytes(dtype: torch.dtype, kind: str) -> None:
    x = torch.randn(100_001).to(dtype)
    buffer = quantize(x.cuda(), kind)
    assert torch.equal(buffer.cpu(), quantize(x, kind))
    values = dequantize(buffer, len(x), kind, dtype=dtype)
    assert torch.equal(values.cpu(), dequantize(buffer.cpu(), len(x), kind, dtype=dtype))
