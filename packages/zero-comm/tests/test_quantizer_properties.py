"""Properties for every input: error, zeros, idempotence, isolation, length, the exact bytes."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quantizer_reference import (
    LEVEL,
    hadamard,
    reference_buffer,
    reference_values,
    steps_per_element,
)
from support.quantizer_strategies import (
    asymmetric,
    flat_tensors,
    formats,
    plain,
    rotated,
    seeds,
    symmetric,
)
from torch import Tensor

from zero_comm import BlockFormat, dequantize, quantize, quantized_nbytes


def round_trip(x: Tensor, fmt: BlockFormat, seed: int | None = None) -> Tensor:
    buffer = quantize(x, fmt, seed=seed)
    return dequantize(buffer, x.numel(), fmt, dtype=x.dtype)


def rounding(y: Tensor) -> Tensor:
    """Return half the spacing of ``y``'s dtype at ``y``, in fp64."""
    info = torch.finfo(y.dtype)
    return (y.double().abs() * info.eps / 2).clamp(min=info.smallest_normal * info.eps / 2)


def spacing_in_steps(x: Tensor, y: Tensor, steps: Tensor, fmt: BlockFormat) -> Tensor:
    """Return the distance of two neighbouring codes at ``x``, counted in steps."""
    if fmt.kind in ("int8", "int4"):
        return torch.ones(len(x), dtype=torch.float64)
    emin, mantissa_bits = {"e4m3": (-6, 3), "e5m2": (-14, 2)}[fmt.kind]
    v = torch.maximum(x.double().abs(), y.double().abs()) / steps * (1 + 2**-20)
    return torch.exp2(v.log2().floor().clamp(min=emin) - mantissa_bits)


def error_bound(x: Tensor, y: Tensor, fmt: BlockFormat, in_steps: float) -> Tensor:
    steps = steps_per_element(x, fmt)
    bound = steps * spacing_in_steps(x, y, steps, fmt) * in_steps
    # fp32: some roundings of values of up to LEVEL steps, or of the largest of the block.
    noise = steps * LEVEL[fmt.kind] * 2.0**-21 + x.double().abs() * 2.0**-22
    if not fmt.is_symmetric:
        noise = steps * 2.0**-13 + x.double().abs() * 2.0**-23
    return bound + noise + rounding(y)


@given(flat_tensors, plain)
def test_finite_values_stay_finite_and_within_half_a_step(x: Tensor, fmt: BlockFormat) -> None:
    y = round_trip(x, fmt)
    assert y.isfinite().all()
    assert ((x.double() - y.double()).abs() <= error_bound(x, y, fmt, 0.5)).all()


@given(flat_tensors, plain, st.integers(0, 2**32 - 1))
def test_error_of_stochastic_rounding_is_below_a_step(
    x: Tensor, fmt: BlockFormat, seed: int
) -> None:
    y = round_trip(x, fmt, seed)
    assert ((x.double() - y.double()).abs() <= error_bound(x, y, fmt, 1.0)).all()


@given(flat_tensors, plain, seeds)
def test_zeros_stay_zero(x: Tensor, fmt: BlockFormat, seed: int | None) -> None:
    back = round_trip(x, fmt, seed)[x == 0]
    assert (back == 0).all()
    assert not back.signbit().any()


@given(flat_tensors, symmetric, seeds)
def test_signs_are_never_flipped(x: Tensor, fmt: BlockFormat, seed: int | None) -> None:
    assert (round_trip(x, fmt, seed).double().sign() * x.double().sign() >= 0).all()


@given(flat_tensors, plain)
def test_a_second_round_trip_changes_nothing(x: Tensor, fmt: BlockFormat) -> None:
    once = round_trip(x, fmt)
    assert torch.equal(round_trip(once, fmt), once)


@settings(max_examples=100)
@given(flat_tensors, asymmetric)
def test_the_ends_of_an_asymmetric_block_come_back_exactly(x: Tensor, fmt: BlockFormat) -> None:
    y = round_trip(x.float(), fmt)
    for before, after in zip(x.float().split(fmt.block_size), y.split(fmt.block_size), strict=True):
        step = max(float(before.max()) - float(before.min()), 0.0) / 254 if len(before) else 0.0
        if step > 2.0**-106:
            assert torch.equal(after.min(), before.min())
            assert torch.equal(after.max(), before.max())


@given(flat_tensors, formats, seeds)
def test_bytes_and_values_are_those_of_the_definition(
    x: Tensor, fmt: BlockFormat, seed: int | None
) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        if fmt.has_rotation and not all(
            np.isfinite(hadamard(np.pad(b.float().numpy(), (0, -len(b) % 64)))).all()
            for b in x.split(64)
        ):
            return
        expected, values = reference_buffer(x, fmt, seed), reference_values(x, fmt, seed)
    buffer = quantize(x, fmt, seed=seed)
    assert torch.equal(buffer, expected)
    got = dequantize(buffer, len(x), fmt)
    assert torch.equal(got, values)
    assert torch.equal(got.to(x.dtype), dequantize(buffer, len(x), fmt, dtype=x.dtype))


@given(st.integers(0, 5000), formats)
def test_length_follows_the_formula(numel: int, fmt: BlockFormat) -> None:
    num_blocks = (numel + fmt.block_size - 1) // fmt.block_size
    codes = fmt.block_size * (4 if fmt.kind == "int4" else 8) // 8
    expected = (num_blocks * (codes + (2 if fmt.is_symmetric else 8)) + 15) // 16 * 16
    assert quantized_nbytes(numel, fmt) == expected
    assert quantize(torch.ones(numel), fmt).numel() == expected


@given(flat_tensors, formats, st.data())
def test_blocks_do_not_affect_each_other(x: Tensor, fmt: BlockFormat, data: st.DataObject) -> None:
    if not len(x):
        return
    before = quantize(x, fmt)
    at = data.draw(st.integers(0, len(x) - 1))
    changed = x.clone()
    changed[at] = data.draw(st.sampled_from([0.0, 1e4, float("nan"), float("-inf")]))
    after = dequantize(quantize(changed, fmt), len(x), fmt)
    kept = dequantize(before, len(x), fmt)
    start = at - at % fmt.block_size
    for part in (slice(0, start), slice(start + fmt.block_size, None)):
        assert torch.equal(after[part].nan_to_num(), kept[part].nan_to_num())


@given(flat_tensors, formats, seeds, st.data())
def test_a_nonfinite_value_makes_its_block_nan(
    x: Tensor, fmt: BlockFormat, seed: int | None, data: st.DataObject
) -> None:
    if not len(x):
        return
    at = data.draw(st.integers(0, len(x) - 1))
    x[at] = data.draw(st.sampled_from([float("nan"), float("inf"), float("-inf")]))
    y = round_trip(x, fmt, seed)
    start = at - at % fmt.block_size
    assert y[start : start + fmt.block_size].isnan().all()


@given(flat_tensors, plain, st.data())
def test_a_nonfinite_block_has_codes_of_zero_and_one_bit_pattern(
    x: Tensor, fmt: BlockFormat, data: st.DataObject
) -> None:
    x = x[: fmt.block_size].clone()
    if not len(x):
        return
    x[data.draw(st.integers(0, len(x) - 1))] = data.draw(
        st.sampled_from([float("nan"), -float("nan"), float("inf")])
    )
    scale = bytes.fromhex("c07f") if fmt.is_symmetric else bytes.fromhex("0000c07f") * 2
    num_codes = fmt.block_size // (2 if fmt.kind == "int4" else 1)
    data_bytes = bytes(quantize(x, fmt).tolist())
    assert data_bytes == (bytes(num_codes) + scale).ljust(len(data_bytes), b"\0")


@given(flat_tensors, rotated)
def test_a_rotation_keeps_the_norm_of_the_error(x: Tensor, fmt: BlockFormat) -> None:
    x = x.double().clamp(-1e30, 1e30).float()
    padded = torch.nn.functional.pad(x, (0, -len(x) % fmt.block_size))
    turned = torch.from_numpy(hadamard(padded.numpy()))
    unrotated = BlockFormat(fmt.kind, fmt.block_size, fmt.is_symmetric)
    step = steps_per_element(turned, unrotated)
    error = (error_bound(turned, turned, unrotated, 0.5 * 1.125) + step * 2.0**-12).square()
    bound = error.view(-1, 64).sum(1).sqrt() + padded.double().view(-1, 64).norm(dim=1) * 2.0**-20
    y = round_trip(padded, fmt)
    assert ((padded.double() - y.double()).view(-1, 64).norm(dim=1) <= bound).all()


def test_a_rotation_spreads_an_outlier_evenly() -> None:
    x = torch.zeros(64)
    x[17] = 127.0 * 8  # a row of the matrix, times 127
    buffer = quantize(x, BlockFormat("int8", 64, has_rotation=True))
    signs = [127 * (-1) ** bin(17 & column).count("1") for column in range(64)]
    assert buffer[:64].view(torch.int8).tolist() == signs
    assert torch.equal(dequantize(buffer, 64, BlockFormat("int8", 64, has_rotation=True)), x)


@settings(max_examples=12)
@given(plain, st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 2**16))
def test_stochastic_rounding_is_right_on_average(
    fmt: BlockFormat, dtype: torch.dtype, at: int
) -> None:
    x = torch.randn(fmt.block_size, generator=torch.Generator().manual_seed(at)).to(dtype)
    x[0] = 0
    num_draws = 400
    draws = [dequantize(quantize(x, fmt, seed=at + i), len(x), fmt) for i in range(400)]
    values = torch.stack(draws).double()
    steps = steps_per_element(x, fmt)
    spacing = steps * spacing_in_steps(x, values.abs().amax(0), steps, fmt)
    # A draw's standard deviation is at most half the spacing: the mean's, here times six.
    error = (values.mean(0) - x.double()).abs()
    is_end = x.abs() == x.abs().max()  # the maximum is rounded to bf16: the top may be clamped
    bound = spacing * (6 * 0.5 / num_draws**0.5)
    assert (error <= bound)[~is_end].all()
    assert (values[:, 0] == 0).all()
    # It isn't rounding to the nearest: some element came out on both sides of itself.
    assert ((values > x.double()).any(0) & (values < x.double()).any(0)).any()


@settings(max_examples=20)
@given(st.integers(0, 2), st.integers(0, 300), st.sampled_from(["int8", "int4", "e4m3"]))
def test_chunks_do_not_show_in_the_bytes(num_chunks: int, rest: int, kind: str) -> None:
    fmt = BlockFormat(kind, 256, kind != "int4")
    numel = num_chunks * (1 << 18) + rest
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    y = round_trip(x, fmt)
    cut = numel // 512 * 256
    for part in (slice(0, cut), slice(cut, numel)):
        assert torch.equal(round_trip(x[part], fmt), y[part])
