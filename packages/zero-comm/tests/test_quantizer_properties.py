"""Properties for every input: exact bytes, error bounds, and non-finite values."""

import hashlib
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.backends import TORCH, Target, every_host
from support.quantizer_strategies import ALL_DTYPES, flat_tensors, formats, plain, seeds
from torch import Tensor

from zero_comm import BlockFormat, dequantize, quantize, quantized_nbytes

LEVEL = {"int8": 127, "int4": 7, "e4m3": 448, "e5m2": 57344}


def round_trip(x: Tensor, fmt: BlockFormat, seed: int | None = None) -> Tensor:
    buffer = quantize(x, fmt, seed=seed)
    return dequantize(buffer, x.numel(), fmt, dtype=x.dtype)


def rounding(y: Tensor) -> Tensor:
    """Return an upper bound of half the spacing of ``y``'s dtype at ``y``, in fp64."""
    info = torch.finfo(y.dtype)
    return (y.double().abs() * info.eps / 2).clamp(min=info.smallest_normal * info.eps / 2)


def steps_per_element(x: Tensor, fmt: BlockFormat) -> Tensor:
    """Return the step of each element's block by the notes in `block_format`, in fp64."""
    top = 65280.0 if x.dtype == torch.float16 else torch.finfo(torch.bfloat16).max
    steps = []
    for block in x.float().split(fmt.block_size) if len(x) else ():
        if fmt.is_symmetric:
            maximum = block.abs().max().clamp(2.0**-100, top).bfloat16()
            steps.append(maximum.item() / LEVEL[fmt.kind])
        else:
            extent = block.max().item() - block.min().item()
            steps.append(max(extent / (2 * LEVEL[fmt.kind]), 2.0**-107))
    step_of = torch.tensor(steps, dtype=torch.float64)
    return step_of.repeat_interleave(fmt.block_size)[: len(x)]


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
def test_bytes_and_values_are_those_of_torch(target: Target) -> None:
    def check(given: tuple[Tensor, BlockFormat, int | None]) -> None:
        x, fmt, seed = given
        buffer = quantize(x, fmt, seed=seed)
        values = dequantize(buffer, len(x), fmt)
        assert buffer.numel() == quantized_nbytes(len(x), fmt)
        assert torch.equal(values.to(x.dtype), dequantize(buffer, len(x), fmt, dtype=x.dtype))
        with TORCH.forced():
            assert torch.equal(buffer, quantize(x, fmt, seed=seed))
            assert torch.equal(values, dequantize(buffer, len(x), fmt))

    with target.forced():
        target.for_all(check, st.tuples(flat_tensors, formats, seeds))


DIGESTS = {
    "int8": "7f9c2cd95dba0e09",
    "int4": "077343f4458d656d",
    "e4m3": "71733d062811cd26",
    "e5m2": "7111e65dffd27f9b",
}
"""Start of the SHA-256 of the buffers and values of fixed numbers."""


@pytest.mark.parametrize("kind", DIGESTS)
def test_bytes_are_those_of_earlier_releases(kind: str) -> None:
    numbers, digest = (torch.arange(517) * 7919 % 1009 - 504) / 512, hashlib.sha256()
    numbers[200:206] = torch.tensor([1e-38, -1e-45, 6e4, -6e4, 0.0, -0.0])  # a block of extremes
    layouts = product((True, False) if kind.startswith("int") else (True,), (False, True))
    for (is_symmetric, has_rotation), dtype in product(layouts, ALL_DTYPES):
        fmt = BlockFormat(kind, 192, is_symmetric, has_rotation)
        for seed in (None, 5):
            buffer = quantize(numbers.to(dtype), fmt, seed=seed)
            values = dequantize(buffer, 517, fmt).view(torch.uint8)
            digest.update(bytes(buffer.tolist() + values.tolist()))
    assert digest.hexdigest().startswith(DIGESTS[kind])


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
