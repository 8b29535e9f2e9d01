"""The quantizer's arguments: shapes, devices, given outputs, refusals."""

import re

import pytest
import torch
from quantizer_reference import ALL_DTYPES

from zero_comm import DEFAULT_BLOCK_SIZE, dequantize, quantize, quantized_nbytes


def test_known_bytes_of_one_8_bit_block() -> None:
    x = torch.tensor([127.0, -127.0, 0.0, 1.0, -1.0, 2.5, 3.5, -0.4])
    buffer = quantize(x, bits=8, block_size=8)
    maximum = [0xFE, 0x42]  # bfloat16 127.0, little endian
    assert buffer.tolist() == [127, 129, 0, 1, 255, 2, 4, 0, *maximum, *[0] * 6]
    back = dequantize(buffer, 8, bits=8, block_size=8)
    assert back.tolist() == [127.0, -127.0, 0.0, 1.0, -1.0, 2.0, 4.0, 0.0]


def test_known_bytes_of_one_4_bit_block() -> None:
    x = torch.tensor([7.0, -7.0, 0.0, -1.0, 1.0, -1.0, 7.0, -7.0])
    buffer = quantize(x, bits=4, block_size=8)
    pairs = [7 + 16 * 1, 256 - 7 - 16, 16 * 7, 256 - 1 - 16 * 7]
    assert buffer.tolist() == [*pairs, 0xE0, 0x40, *[0] * 10]
    assert dequantize(buffer, 8, bits=4, block_size=8).tolist() == x.tolist()


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_default_block_size_is_used_when_none_is_given(dtype: torch.dtype, bits: int) -> None:
    x = torch.randn(1000).to(dtype)
    buffer = quantize(x, bits=bits)
    assert torch.equal(buffer, quantize(x, bits=bits, block_size=DEFAULT_BLOCK_SIZE[bits]))
    assert buffer.numel() == quantized_nbytes(1000, bits=bits)


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


def test_input_is_never_changed() -> None:
    x = torch.randn(1000)
    kept = x.clone()
    buffer = quantize(x, bits=4)
    bytes_kept = buffer.clone()
    dequantize(buffer, 1000, bits=4)
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
        ({"bits": 5}, "bits"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": -256}, "block_size"),
        ({"block_size": 12}, "block_size"),
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
        ({"bits": 16}, "bits"),
        ({"block_size": 100}, "block_size"),
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_a_cuda_device_gives_the_same_bytes(dtype: torch.dtype, bits: int) -> None:
    x = torch.randn(100_001).to(dtype)
    buffer = quantize(x.cuda(), bits=bits)
    assert torch.equal(buffer.cpu(), quantize(x, bits=bits))
    values = dequantize(buffer, len(x), dtype=dtype, bits=bits)
    assert torch.equal(values.cpu(), dequantize(buffer.cpu(), len(x), dtype=dtype, bits=bits))
