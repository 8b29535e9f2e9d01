"""Hypothesis strategies for formats and for tensors that are difficult to quantize."""

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from zero_comm import BlockFormat

ALL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
block_sizes = st.sampled_from([8, 24, 64, 128, 256])
symmetric = st.builds(BlockFormat, st.sampled_from(["int8", "int4", "e4m3", "e5m2"]), block_sizes)
asymmetric = st.builds(BlockFormat, st.sampled_from(["int8", "int4"]), block_sizes, st.just(False))
plain = st.one_of(symmetric, asymmetric)
rotated = st.builds(
    lambda fmt, blocks: BlockFormat(fmt.kind, 64 * blocks, fmt.is_symmetric, True),
    plain,
    st.integers(1, 4),
)
formats = st.one_of(plain, plain, rotated)
dtypes = st.sampled_from(ALL_DTYPES)
seeds = st.one_of(st.none(), st.integers(0, 2**32 - 1))


@st.composite
def extreme_values(draw: st.DrawFn) -> Tensor:
    """Draw at most 40 elements from the whole range of the dtype, or of fp32 if it is smaller."""
    dtype = draw(dtypes)
    top = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    value = st.floats(-top, top, width=16 if dtype == torch.float16 else 32)
    values = draw(st.lists(value, max_size=40))
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    return x.clamp(-top, top)  # bfloat16 may round up to Inf


@st.composite
def typical_values(draw: st.DrawFn) -> Tensor:
    """Draw a tensor of at most 900 elements: a magnitude per 8 elements, and a share of zeros."""
    numel = draw(st.one_of(st.sampled_from([0, 1, 2, 3, 7, 255, 256, 257]), st.integers(0, 900)))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(dtypes)
    x = random.standard_normal(numel)
    low = -24 if dtype == torch.float16 else -120
    x *= np.exp2(random.integers(low, 12, -(-numel // 8))).repeat(8)[:numel]
    x[random.random(numel) < draw(st.sampled_from([0.0, 0.2, 1.0]))] = 0
    return torch.from_numpy(x).to(dtype)


@st.composite
def close_values(draw: st.DrawFn) -> Tensor:
    """Draw values near a power of two, spread over few or many of the dtype's spacings."""
    dtype = draw(dtypes)
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([2.0**-22, 2.0**-16, 2.0**-9, 0.1, 1.0, 2.0]))
    x = 1 + spread * (random.random(draw(st.integers(1, 600))) - draw(st.floats(0, 1)))
    x *= 2.0 ** draw(st.integers(-10, 10)) * draw(st.sampled_from([-1, 1]))
    return torch.from_numpy(x).to(dtype)


flat_tensors = st.one_of(typical_values(), extreme_values(), close_values())
