"""What holds for every input: error, zeros, idempotence, isolation, length, the exact bytes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantizer_reference import reference_buffer, steps_per_element
from quantizer_strategies import flat_tensors, formats
from torch import Tensor

from zero_comm import dequantize, quantize, quantized_nbytes

Format = tuple[int, int]


def round_trip(x: Tensor, bits: int, block_size: int) -> Tensor:
    buffer = quantize(x, bits=bits, block_size=block_size)
    return dequantize(buffer, x.numel(), dtype=x.dtype, bits=bits, block_size=block_size)


@given(flat_tensors, formats)
def test_error_is_at_most_half_a_step(x: Tensor, fmt: Format) -> None:
    y = round_trip(x, *fmt)
    step = steps_per_element(x, *fmt).double()
    # fp32: three roundings of a value of up to 127 steps; then the spacing of the dtype itself.
    info = torch.finfo(x.dtype)
    spacing = (y.double().abs() * info.eps / 2).clamp(min=info.smallest_normal * info.eps / 2)
    bound = step * (0.5 + 127 * 3 * 2**-24) + spacing
    assert ((x.double() - y.double()).abs() <= bound).all()


@given(flat_tensors, formats)
def test_finite_values_stay_finite(x: Tensor, fmt: Format) -> None:
    assert round_trip(x, *fmt).isfinite().all()


@given(flat_tensors, formats)
def test_zeros_stay_zero(x: Tensor, fmt: Format) -> None:
    assert (round_trip(x, *fmt)[x == 0] == 0).all()


@given(flat_tensors, formats)
def test_signs_are_never_flipped(x: Tensor, fmt: Format) -> None:
    assert (round_trip(x, *fmt).double().sign() * x.double().sign() >= 0).all()


@given(flat_tensors, formats)
def test_a_second_round_trip_changes_nothing(x: Tensor, fmt: Format) -> None:
    once = round_trip(x, *fmt)
    assert torch.equal(round_trip(once, *fmt), once)


@given(flat_tensors, formats)
def test_bytes_are_those_of_the_definition(x: Tensor, fmt: Format) -> None:
    bits, block_size = fmt
    buffer = quantize(x, bits=bits, block_size=block_size)
    assert torch.equal(buffer, reference_buffer(x, bits, block_size))


@given(st.integers(0, 5000), formats)
def test_length_follows_the_formula(numel: int, fmt: Format) -> None:
    bits, block_size = fmt
    num_blocks = (numel + block_size - 1) // block_size
    expected = (num_blocks * (block_size * bits // 8 + 2) + 15) // 16 * 16
    assert quantized_nbytes(numel, bits=bits, block_size=block_size) == expected
    assert quantize(torch.ones(numel), bits=bits, block_size=block_size).numel() == expected


@given(flat_tensors, formats, st.data())
def test_blocks_do_not_affect_each_other(x: Tensor, fmt: Format, data: st.DataObject) -> None:
    block_size = fmt[1]
    before = round_trip(x, *fmt)
    if not len(x):
        return
    at = data.draw(st.integers(0, len(x) - 1))
    new = data.draw(st.sampled_from([0.0, 1e4, float("nan"), float("-inf")]))
    changed = x.clone()
    changed[at] = new
    after = round_trip(changed, *fmt)
    start = at - at % block_size
    assert torch.equal(after[:start], before[:start])
    assert torch.equal(after[start + block_size :], before[start + block_size :])


@given(flat_tensors, formats, st.data())
def test_a_nonfinite_value_makes_its_block_nan(x: Tensor, fmt: Format, data: st.DataObject) -> None:
    if not len(x):
        return
    at = data.draw(st.integers(0, len(x) - 1))
    x[at] = data.draw(st.sampled_from([float("nan"), float("inf"), float("-inf")]))
    y = round_trip(x, *fmt)
    start = at - at % fmt[1]
    assert y[start : start + fmt[1]].isnan().all()


@settings(max_examples=20)
@given(st.integers(0, 2), st.integers(0, 300), st.sampled_from([8, 4]))
def test_chunks_do_not_show_in_the_bytes(num_chunks: int, rest: int, bits: int) -> None:
    numel = num_chunks * (1 << 18) + rest
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    whole = quantize(x, bits=bits, block_size=256)
    y = dequantize(whole, numel, bits=bits, block_size=256)
    cut = numel // 512 * 256
    for part in (slice(0, cut), slice(cut, numel)):
        assert torch.equal(round_trip(x[part], bits, 256), y[part])
