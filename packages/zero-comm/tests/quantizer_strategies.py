"""Hypothesis strategies: formats and flat tensors that are hard on a quantizer."""

import torch
from hypothesis import strategies as st
from quantizer_reference import ALL_DTYPES
from torch import Tensor

formats = st.tuples(st.sampled_from([8, 4]), st.sampled_from([8, 24, 64, 128, 256]))
dtypes = st.sampled_from(ALL_DTYPES)


@st.composite
def extreme_values(draw: st.DrawFn) -> Tensor:
    """Few elements, each anywhere in its dtype's range: subnormal, zero, the largest."""
    dtype = draw(dtypes)
    top = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    value = st.floats(-top, top, width=16 if dtype == torch.float16 else 32)
    values = draw(st.lists(value, max_size=40))
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    return x.clamp(-top, top)  # a bfloat16 may have been rounded up to Inf


@st.composite
def typical_values(draw: st.DrawFn) -> Tensor:
    """Any length, every run of 8 elements at a magnitude of its own, some elements zero."""
    numel = draw(st.one_of(st.sampled_from([0, 1, 2, 3, 7, 255, 256, 257]), st.integers(0, 900)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    dtype = draw(dtypes)
    x = torch.randn(numel, generator=generator, dtype=torch.float64)
    low = -24 if dtype == torch.float16 else -120
    exponents = torch.randint(low, 12, (-(-numel // 8),), generator=generator)
    x *= torch.exp2(exponents.double()).repeat_interleave(8)[:numel]
    x[torch.rand(numel, generator=generator) < draw(st.sampled_from([0.0, 0.2, 1.0]))] = 0
    return x.to(dtype)


flat_tensors = st.one_of(typical_values(), extreme_values())
