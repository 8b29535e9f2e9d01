"""Properties for every input: exact bytes, error bounds, and non-finite values."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.backends import Target, every_host
from support.quantizer_reference import (
    LEVEL,
    hadamard,
    reference_buffer,
    reference_values,
    steps_per_element,
)
from support.quantizer_strategies import flat_tensors, formats, plain, seeds
from torch import Tensor

from zero_comm import BlockFormat, dequantize, quantize, quantized_nbytes


def round_trip(x: Tensor, fmt: BlockFormat, seed: int | None = None) -> Tensor:
    buffer = quantize(x, fmt, seed=seed)
    return dequantize(buffer, x.numel(), fmt, dtype=x.dtype)


def rounding(y: Tensor) -> Tensor:
    """Return an upper bound of half the spacing of ``y``'s dtype at ``y``, in fp64."""
    info = torch.finfo(y.dtype)
    return (y.double().abs() * info.eps / 2).clamp(min=info.smallest_normal * info.eps / 2)


def spacing_in_steps(x: Tensor, y: Tensor, steps: Tensor, fmt: BlockFormat) -> Tensor:
    """Return the spacing of the format at the larger of ``abs(x)`` and ``abs(y)``, in steps."""
    if fmt.kind in ("int8", "int4"):
        return torch.ones(len(x), dtype=torch.float64)
    emin, mantissa_bits = {"e4m3": (-6, 3), "e5m2": (-14, 2)}[fmt.kind]
    v = torch.maximum(x.double().abs(), y.double().abs()) / steps * (1 + 2**-20)
    return torch.exp2(v.log2().floor().clamp(min=emin) - mantissa_bits)


def error_bound(x: Tensor, y: Tensor, fmt: BlockFormat, in_steps: float) -> Tensor:
    steps = steps_per_element(x, fmt)
    bound = steps * spacing_in_steps(x, y, steps, fmt) * in_steps
    # Error of fp32 arithmetic. A block's largest value is LEVEL steps.
    noise = steps * LEVEL[fmt.kind] * 2.0**-21 + x.double().abs() * 2.0**-22
    if not fmt.is_symmetric:
        noise = steps * 2.0**-13 + x.double().abs() * 2.0**-23
    return bound + noise + rounding(y)


@given(flat_tensors, plain)
def test_finite_values_stay_finite_and_within_half_a_step(x: Tensor, fmt: BlockFormat) -> None:
    y = round_trip(x, fmt)
    assert y.isfinite().all()
    assert ((x.double() - y.double()).abs() <= error_bound(x, y, fmt, 0.5)).all()


@every_host
def test_bytes_and_values_are_those_of_the_definition(target: Target) -> None:
    def check(given: tuple[Tensor, BlockFormat, int | None]) -> None:
        x, fmt, seed = given
        with np.errstate(over="ignore", invalid="ignore"):
            if fmt.has_rotation and not all(
                np.isfinite(hadamard(np.pad(b.float().numpy(), (0, -len(b) % 64)))).all()
                for b in x.split(64)
            ):
                return
            expected, values = reference_buffer(x, fmt, seed), reference_values(x, fmt, seed)
        buffer = quantize(x, fmt, seed=seed)
        assert torch.equal(buffer, expected)
        assert buffer.numel() == quantized_nbytes(len(x), fmt)
        got = dequantize(buffer, len(x), fmt)
        assert torch.equal(got, values)
        assert torch.equal(got.to(x.dtype), dequantize(buffer, len(x), fmt, dtype=x.dtype))

    with target.forced():
        target.for_all(check, st.tuples(flat_tensors, formats, seeds))


@given(flat_tensors, formats, seeds, st.data())
def test_a_nonfinite_value_makes_its_block_nan_and_no_other(
    x: Tensor, fmt: BlockFormat, seed: int | None, data: st.DataObject
) -> None:
    if not len(x):
        return
    kept = round_trip(x, fmt, seed)
    at = data.draw(st.integers(0, len(x) - 1))
    x[at] = data.draw(st.sampled_from([float("nan"), float("inf"), float("-inf")]))
    y = round_trip(x, fmt, seed)
    start = at - at % fmt.block_size
    assert y[start : start + fmt.block_size].isnan().all()
    for part in (slice(0, start), slice(start + fmt.block_size, None)):
        assert torch.equal(y[part].nan_to_num(), kept[part].nan_to_num())


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
    # A draw's standard deviation is at most half the spacing. The bound is six times the mean's.
    error = (values.mean(0) - x.double()).abs()
    is_end = x.abs() == x.abs().max()  # bf16 may round the maximum down, which clamps x
    bound = spacing * (6 * 0.5 / num_draws**0.5)
    assert (error <= bound)[~is_end].all()
    assert (values[:, 0] == 0).all()
    # Unlike with rounding to the nearest, some element was rounded both up and down.
    assert ((values > x.double()).any(0) & (values < x.double()).any(0)).any()
