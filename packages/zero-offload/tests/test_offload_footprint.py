"""Closed forms of `zero_offload.footprint` against what real tiers report."""

from __future__ import annotations

import pytest
import torch
from support.kernels import ReferenceKernel
from support.tiers import CPU, group_of
from torch import optim

from zero_offload import create_tier
from zero_offload.footprint import tier_footprint
from zero_offload.tier import make_device_tier

NUMEL = 3 * 1024
PIECES = [(0, 1024, 0), (1024, NUMEL, 0)]


@pytest.mark.parametrize("undo", ["none", "all", 5000])
@pytest.mark.parametrize("num_added", [1, 3, 6])
@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("state_dtype", "nbytes_per_element"), [("float32", 8), ("bfloat16", 4), ("int8", 2.0625)]
)
def test_state_bytes_are_those_that_a_tier_reports(
    state_dtype: str,
    nbytes_per_element: float,
    dtype: torch.dtype,
    ratio: float,
    num_added: int,
    undo: int | str,
) -> None:
    param = torch.ones(NUMEL, dtype=dtype)
    groups = [group_of(optim.AdamW)]
    block = {"device": "cpu", "ratio": ratio, "state_dtype": state_dtype}
    if isinstance(undo, int):
        block["undo_buffer_size"] = undo
    config = {"offload_optimizer": block}
    tier = create_tier(
        numel=NUMEL,
        pieces=PIECES,
        params=[(0, param)],
        device=CPU,
        optimizer_class=optim.AdamW,
        groups=groups,
        config=config,
        adam_kernel=ReferenceKernel(),
        device_tier=make_device_tier,
    )
    if undo != "none":
        assert tier.enable_undo()
    if num_added > 1:
        tier.expect_micro_steps(num_added)
        for micro_step in range(num_added):
            is_last = micro_step + 1 == num_added
            tier.add_grad(0, torch.ones(NUMEL, dtype=dtype), is_last=is_last)
    else:
        tier.offer_grad(0, torch.ones(NUMEL, dtype=dtype))
    tier.step(groups, range(len(PIECES)), grad_scale=1.0)
    tier.wait_params(0, NUMEL)
    form = tier_footprint(
        numel=NUMEL,
        pieces=PIECES,
        params=[(0, param.to("meta"))],
        grad_dtypes=[dtype],
        num_added=num_added,
        resting=(),
        is_accelerated=False,
        optimizer_class=optim.AdamW,
        groups=groups,
        config=config,
        has_kernel=True,
        is_speculative=undo != "none",
    )
    planned = {True: form.host_bytes(ratio), False: form.device_bytes(ratio)}
    states = 0
    for part in tier.report():
        assert part.tier is not None
        found = {kind: nbytes for kind, nbytes in part.tier.memory.items() if nbytes}
        assert found == {kind: planned[part.is_host][kind] for kind in found}
        states += part.tier.memory["optimizer states"]
    assert states == NUMEL * nbytes_per_element
