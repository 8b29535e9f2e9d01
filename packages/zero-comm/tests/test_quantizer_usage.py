"""The quantizer's arguments: shapes, devices, output tensors, and refusals."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.quantizer_strategies import ALL_DTYPES
from torch import Tensor

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
INT4_FORMATS = [BlockFormat("int4", 128, s, r) for s in (False, True) for r in (False, True)]


@pytest.mark.parametrize(
    ("fmt", "values", "codes", "scale", "back"),
    [
        (
            BlockFormat("int8", 8),
            [127.0, -127.0, 0.0, 1.0, -1.0, 2.5, 3.5, -0.4],
            [127, 129, 0, 1, 255, 2, 4, 0],
            torch.tensor([127.0]).bfloat16(),
            [127.0, -127.0, 0.0, 1.0, -1.0, 2.0, 4.0, 0.0],
        ),
        (
            BlockFormat("int4", 8, is_symmetric=False),  # the values give a step of 1
            [-4.0, 10.0, 0.0, -0.0, -3.0, 9.4, 0.4, 1.0],
            [1 + (2 << 4), 15 + (14 << 4), 5 << 4, 6 << 4],
            torch.tensor([-4.0, 10.0]),
            [-4, 10, 0, 0, -3, 9, 0, 1],
        ),
    ],
)
def test_a_block_has_known_bytes(
    fmt: BlockFormat, values: list[float], codes: list[int], scale: Tensor, back: list[float]
) -> None:
    buffer = quantize(torch.tensor(values), fmt)
    assert buffer.tolist() == [*codes, *scale.view(torch.uint8).tolist()] + [0] * (
        16 - len(codes) - scale.nbytes
    )
    assert dequantize(buffer, 8, fmt).tolist() == back


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
def test_a_name_means_the_default_block_size_and_input_is_not_changed(
    dtype: torch.dtype, kind: str
) -> None:
    x = torch.randn(1000).to(dtype)
    kept = x.clone()
    buffer = quantize(x, kind)
    assert torch.equal(buffer, quantize(x, BlockFormat(kind, DEFAULT_BLOCK_SIZE[kind])))
    assert buffer.numel() == quantized_nbytes(1000, kind)
    bytes_kept = buffer.clone()
    wide = dequantize(buffer, 1000, kind)
    assert torch.equal(wide.to(dtype), dequantize(buffer, 1000, kind, dtype=dtype))
    assert torch.equal(x, kept)
    assert torch.equal(buffer, bytes_kept)


def test_any_shape_is_read_in_flat_order_and_without_a_graph() -> None:
    whole = torch.nn.Parameter(torch.randn(40, 30))
    for x in (whole[::2].t(), whole.view(-1)[::2], torch._neg_view(whole[:20])):
        buffer = quantize(x)
        assert torch.equal(buffer, quantize(x.resolve_neg().contiguous().view(-1)))
        if x.is_contiguous():
            rows = torch.empty_like(buffer)
            quantize_rows(x.view(-1), "int8", rows.view(1, -1))
            assert torch.equal(rows, buffer)
        assert not buffer.requires_grad
        assert not dequantize(buffer, 600).requires_grad
    with pytest.raises(ValueError, match=r"must have \d+ elements for numel = 9999, got"):
        dequantize(buffer, 9999)


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


@pytest.mark.parametrize("fmt", INT4_FORMATS)
@pytest.mark.parametrize("numel", [0, 1, 128, 1000])
def test_rows_are_summed_from_left_to_right(fmt: BlockFormat, numel: int) -> None:
    # Rows differ in magnitude, so another order or precision would change the sum.
    parts = [torch.randn(numel) * 10.0**i for i in (0, 3, -2, 3)]
    rows = torch.stack([quantize(part, fmt) for part in parts])
    total = torch.empty(numel)
    dequantize_sum(rows, numel, fmt, total)
    expected = torch.zeros(numel)
    for row in rows:
        expected += dequantize(row.clone(), numel, fmt)
    assert torch.equal(total, expected)


def of_bytes(*shape: int, device: str = "cpu") -> Tensor:
    return torch.zeros(*shape, dtype=torch.uint8, device=device)


READ_ROWS: dict[str, list[Any]] = {
    "rows": [of_bytes(2, 256), of_bytes(272), of_bytes(2, 272, device="meta"), of_bytes(0, 272)],
    "numel": [-1],
    "format": ["int"],
    "out": [torch.empty(300), torch.empty(800)[::2], torch.empty(400, dtype=torch.int32)],
}
REFUSED: dict[Callable[..., Any], tuple[dict[str, Any], dict[str, list[Any]]]] = {
    quantize: (
        {"x": torch.zeros(200)},
        {
            "x": [torch.zeros(8, dtype=d) for d in (torch.int32, torch.complex64, torch.bool)],
            "format": ["int5"],
            "nonfinite": ["clip"],
            "out": [
                of_bytes(15),
                torch.empty(272),
                of_bytes(544)[::2],
                of_bytes(272, device="meta"),
            ],
        },
    ),
    dequantize: (
        {"buffer": of_bytes(272), "numel": 200},
        {
            "buffer": [of_bytes(256), of_bytes(288), torch.empty(272), of_bytes(2, 136)],
            "numel": [-1],
            "dtype": [torch.int8],
            "format": ["fp8"],
            "out": [
                torch.empty(200, dtype=torch.float64),
                torch.empty(199),
                torch.empty(400)[::2],
                torch._neg_view(torch.empty(200)),
                torch.empty(200, device="meta"),
            ],
        },
    ),
    quantize_rows: (
        {"x": torch.zeros(400), "format": "int8", "out": of_bytes(2, 272)},
        {
            "x": [torch.zeros(10, 20), torch.zeros(401), torch.zeros(400, dtype=torch.int32)],
            "format": ["int"],
            "out": [
                of_bytes(2, 256),
                of_bytes(2, 273)[:, 1:],
                of_bytes(272, 2).t(),
                of_bytes(544),
                torch.empty(2, 272),
                of_bytes(1, 272).expand(2, 272),
                of_bytes(2, 272, device="meta"),
            ],
        },
    ),
    dequantize_rows: (
        {"rows": of_bytes(2, 272), "numel": 200, "format": "int8", "out": torch.empty(400)},
        {**READ_ROWS, "rows": READ_ROWS["rows"][:3]},
    ),
    dequantize_sum: (
        {"rows": of_bytes(2, 272), "numel": 200, "format": "int8", "out": torch.empty(200)},
        READ_ROWS,
    ),
}


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        pytest.param(function, name, value, id=f"{function.__name__}-{name}-{index}")
        for function, (_, refused) in REFUSED.items()
        for name, values in refused.items()
        for index, value in enumerate(values)
    ],
)
def test_the_argument_that_does_not_fit_is_named(
    function: Callable[..., Any], name: str, value: object
) -> None:
    function(**REFUSED[function][0])
    with pytest.raises(ValueError, match=f"^{name} must"):
        function(**{**REFUSED[function][0], name: value})
