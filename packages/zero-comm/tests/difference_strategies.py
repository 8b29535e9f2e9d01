"""Hypothesis strategies: two tensors of any bit patterns, and ones that differ as weights do."""

import torch
from difference_cases import DTYPES, pair
from hypothesis import strategies as st
from torch import Tensor

Pair = tuple[Tensor, Tensor]

# Zeros, denormals, infinities, NaN with and without payloads; each with its negative.
SPECIAL = {
    16: (0, 1, 0x7C00, 0x7E01, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF),
    32: (0, 1, 0x7F800000, 0x7F800001, 0x7FC01234, 0x7FFFFFFF),
}


@st.composite
def any_patterns(draw: st.DrawFn) -> Pair:
    """Few elements, of any two patterns each."""
    dtype = draw(st.sampled_from(DTYPES))
    bits = 8 * dtype.itemsize
    special = [sign | x for x in SPECIAL[bits] for sign in (0, 1 << (bits - 1))]
    pattern = st.one_of(st.sampled_from(special), st.integers(0, 2**bits - 1))
    both = draw(st.lists(st.tuples(pattern, pattern), max_size=30))
    integers = torch.int16 if bits == 16 else torch.int32
    old, new = (
        torch.tensor([patterns[i] for patterns in both], dtype=torch.int64).to(integers).view(dtype)
        for i in range(2)
    )
    return old, new


@st.composite
def moved_patterns(draw: st.DrawFn) -> Pair:
    """Any length, a share of the elements moved a little or far."""
    dtype = draw(st.sampled_from(DTYPES))
    numel = draw(st.one_of(st.sampled_from([0, 1, 255, 256, 257, 511]), st.integers(0, 1200)))
    share = draw(st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]))
    octaves = draw(st.floats(0, 8 * dtype.itemsize - 1))
    return pair(numel, dtype, share, octaves, draw(st.integers(0, 2**32)))


pairs = st.one_of(moved_patterns(), any_patterns())
