"""Whole parameters pass through the device in pieces, and only to the ranks that want them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zero_core
from zero_core.comm import control
from zero_core.testing import Case, make_model
from zero_core.testing.simulated import SimulatedRanks, simulate

LIMIT = 512


def _full_state(ranks: SimulatedRanks, dtype: str, stage: int) -> tuple[Any, Any, list[int]]:
    """Return full_state_dict of all ranks and of rank 1, and bytes of what was gathered at once."""
    engine = zero_core.build(make_model(), Case(stage, dtype).config(), process_group=ranks)
    group = engine.sharded_state.control
    sizes: list[int] = []
    gather = group.gather_on_device

    def measured(tensor: Tensor) -> Tensor:
        found = gather(tensor)
        sizes.append(found.nbytes)
        return found

    group.gather_on_device = measured
    found = engine.full_state_dict(), engine.full_state_dict(rank=1), sizes
    engine.close()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("dtype", "stage"), [("fp32", 3), ("bf16", 1), ("bf16", 0)])
def test_pieces_make_the_whole(dtype, stage, world_size, monkeypatch) -> None:
    whole = simulate(_full_state, world_size, dtype, stage)
    monkeypatch.setattr(control, "PIECE_BYTES", LIMIT)
    for rank, (full, of_one, sizes) in enumerate(simulate(_full_state, world_size, dtype, stage)):
        expected = whole[rank][0]
        assert list(full) == list(expected)
        assert all(torch.equal(full[name], expected[name]) for name in expected)
        assert list(of_one) == (list(expected) if rank == 1 else [])
        assert max(sizes) <= LIMIT
