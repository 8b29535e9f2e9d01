"""Predictions of `zero_offload.footprint` compared with reports of real tiers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernels import ReferenceKernel
from support.tiers import ADAM, BF16, FP32, Space, make_tier
from torch import optim

from zero_offload.footprint import tier_footprint

NUMEL = 3 * 1024


@pytest.mark.parametrize("undo", ["none", "all", 5000])
@pytest.mark.parametrize("num_added", [1, 4, 6])
@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("state_dtype", "num_kept", "num_all"),
    [("float32", 8, 12), ("bfloat16", 4, 8), ("int8", 2.0625, 6.0625)],
)
def test_state_bytes_are_those_that_a_tier_reports(
    state_dtype: str,
    num_kept: float,
    num_all: float,
    dtype: torch.dtype,
    ratio: float,
    num_added: int,
    undo: int | str,
) -> None:
    space = Space()
    space.numel, space.pieces = NUMEL, [(0, 1024, 0), (1024, NUMEL, 0)]
    space.initial = torch.ones(NUMEL)
    space.params = [(0, space.initial.to(dtype))]
    block: dict[str, Any] = {"ratio": ratio, "state_dtype": state_dtype}
    if isinstance(undo, int):
        block["undo_buffer_size"] = undo
    tier = make_tier(space, kernel=ReferenceKernel(), **block)
    if undo != "none":
        assert tier.enable_undo()
    grad = torch.ones(NUMEL, dtype=dtype)
    if num_added > 1:
        tier.expect_micro_steps(num_added)
        for micro_step in range(num_added):
            tier.add_grad(0, grad.clone(), is_last=micro_step + 1 == num_added)
    else:
        tier.offer_grad(0, grad)
    tier.step(ADAM, space.every, grad_scale=1.0)
    tier.wait_params(0, NUMEL)
    form = tier_footprint(
        numel=NUMEL,
        pieces=space.pieces,
        params=[(0, space.params[0][1].to("meta"))],
        grad_dtypes=[dtype],
        num_added=num_added,
        resting=(),
        is_accelerated=False,
        optimizer_class=optim.AdamW,
        groups=ADAM,
        config={"offload_optimizer": {"device": "cpu", **block}},
        has_kernel=True,
        is_speculative=undo != "none",
    )
    planned = {True: form.host_bytes(ratio), False: form.device_bytes(ratio)}
    states = 0
    copies = {FP32: {1: 4, 4: 4 + 4, 6: 4 + 4}, BF16: {1: 2, 4: 4 * 2, 6: 2 + 4}}[dtype][num_added]
    for part in tier.report():
        assert part.tier is not None
        if ratio == 1.0:
            assert part.tier.memory["gradient copies"] == copies * NUMEL
            assert part.tier.host_bytes == num_all * NUMEL
        found = {kind: nbytes for kind, nbytes in part.tier.memory.items() if nbytes}
        assert found == {kind: planned[part.is_host][kind] for kind in found}
        states += part.tier.memory["optimizer states"]
    assert states == num_kept * NUMEL
