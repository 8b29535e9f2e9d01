"""zero-core's closed form of a message's length against zero-comm, which makes the messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_comm.block_format import BlockFormat, quantized_nbytes
from zero_core import quantized_form

KINDS = ("int8", "int4", "e4m3", "e5m2")


@pytest.mark.parametrize("kind", KINDS)
@given(numel=st.integers(0, 1 << 40))
def test_a_plan_knows_the_length_of_every_quantized_buffer(kind: str, numel: int) -> None:
    assert quantized_form.quantized_nbytes(numel, kind) == quantized_nbytes(numel, kind)


@given(numel=st.integers(0, 1 << 20), block=st.integers(1, 64))
def test_blocks_of_any_length_are_known(numel: int, block: int) -> None:
    for kind in KINDS:
        form = BlockFormat(kind, 8 * block)
        assert quantized_form.quantized_nbytes(numel, kind, 8 * block) == form.nbytes(numel)
