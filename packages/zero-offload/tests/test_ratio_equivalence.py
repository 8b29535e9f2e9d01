"""Any ratio gives the same bits, and those are torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import (
    RATIOS,
    Lion,
    Space,
    assert_same,
    group_of,
    make_tier,
    snapshot,
    torch_oracle,
    train,
)
from torch import Tensor, optim

OPTIMIZERS = [
    pytest.param(optim.SGD, {"lr": 0.1}, id="sgd"),
    pytest.param(
        optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
        id="sgd-dampened",
    ),
    pytest.param(optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, id="sgd-nesterov"),
    pytest.param(optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}, id="adam"),
    pytest.param(optim.Adam, {"lr": 1e-2, "amsgrad": True, "maximize": True}, id="amsgrad"),
    pytest.param(optim.AdamW, {"lr": 1e-2, "foreach": True}, id="adamw-foreach"),
    pytest.param(optim.AdamW, {"lr": torch.tensor(1e-2)}, id="adamw-tensor-lr"),
    pytest.param(optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}, id="adagrad"),
    pytest.param(optim.RMSprop, {"momentum": 0.9, "centered": True}, id="rmsprop"),
    pytest.param(optim.Adadelta, {}, id="adadelta"),
    pytest.param(optim.NAdam, {}, id="nadam"),
    pytest.param(optim.RAdam, {}, id="radam"),
    pytest.param(optim.Adamax, {}, id="adamax"),
    pytest.param(optim.ASGD, {"t0": 2}, id="asgd"),
    pytest.param(optim.Rprop, {}, id="rprop"),
    pytest.param(Lion, {"lr": 1e-2}, id="lion"),
]
ENDS = ("last", "first")


def _run(cls: Any, settings: dict[str, Any], ratio: float) -> tuple[Space, dict[str, Tensor]]:
    space = Space()
    groups = [group_of(cls, **settings)]
    tier = make_tier(space, cls, groups, ratio=ratio)
    train(tier, space, groups, range(7))
    return space, snapshot(tier, space)


@pytest.mark.parametrize(("cls", "settings"), OPTIMIZERS)
def test_torch_route_equals_torch_bit_for_bit_at_every_ratio(
    cls: Any, settings: dict[str, Any]
) -> None:
    space, whole = _run(cls, settings, 1.0)
    plain = {k: v.item() if isinstance(v, Tensor) else v for k, v in settings.items()}
    groups = [group_of(cls, **plain)]
    expected = torch_oracle(space, cls, groups, range(7))
    assert torch.equal(whole["master_weight"][space.covered()], expected[space.covered()])
    assert torch.equal(whole["params"], whole["master_weight"])
    for ratio in RATIOS[:-1]:
        assert_same(_run(cls, settings, ratio)[1], whole)


@pytest.mark.parametrize("cls", [optim.SGD, optim.AdamW, optim.Adam, optim.Adagrad])
def test_fused_torch_kernels_give_the_same_bits_at_every_ratio(cls: Any) -> None:
    """They round a tensor's last elements another way, so a piece is cut at multiples of 16."""
    settings = {"lr": 1e-2, "fused": True}
    if cls is optim.SGD:
        settings["momentum"] = 0.9
    space, whole = _run(cls, settings, 1.0)
    expected = torch_oracle(space, cls, [group_of(cls, **settings)], range(7))
    assert torch.equal(whole["master_weight"][space.covered()], expected[space.covered()])
    for ratio in (*RATIOS[:-1], 0.1, 0.2, 0.25, 0.66, 0.7, 0.71):
        assert_same(_run(cls, settings, ratio)[1], whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW])
def test_kernel_route_gives_the_same_bits_at_every_ratio(
    kernel: Any, cls: Any, dtype: torch.dtype
) -> None:
    results = []
    for ratio in RATIOS:
        space = Space(dtype=dtype)
        groups = [group_of(cls, lr=1e-2, weight_decay=0.1)]
        tier = make_tier(space, cls, groups, ratio=ratio, kernel=kernel)
        train(tier, space, groups, grad_scale=0.5)
        results.append(snapshot(tier, space))
    for result in results:
        assert_same(result, results[0])
        assert torch.equal(result["params"], result["master_weight"].to(dtype))
    expected = torch_oracle(space, cls, groups, grad_scale=0.5)
    # Adam's few roundings per step, four steps: a handful of ulps of weights around 1
    torch.testing.assert_close(results[0]["master_weight"], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.num_threads(2)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("ratio", [0.001, 0.3, 0.5])
def test_large_fused_step_is_cut_without_a_trace(ratio: float, end: str) -> None:
    results = []
    for share in (1.0, ratio):
        space = _large_space()
        groups = [group_of(optim.AdamW, lr=1e-2, fused=True)]
        tier = make_tier(space, optim.AdamW, groups, ratio=share, host_share=end)
        num_more = tier.host_numel - round(share * space.numel)
        assert 0 <= (num_more if end == "last" else -num_more) < 16  # the split point moves down
        train(tier, space, groups)
        results.append(snapshot(tier, space))
    assert_same(results[0], results[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", ["int8", "bfloat16"])
def test_compact_states_give_the_same_bits_at_every_ratio(
    kernel: Any, state_dtype: str, dtype: torch.dtype
) -> None:
    """A piece is cut where its blocks meet."""
    results = []
    for ratio in (*RATIOS, 0.6, 0.7):
        space = Space(dtype=dtype)
        groups = [group_of(optim.AdamW, lr=1e-2, weight_decay=0.1)]
        tier = make_tier(
            space, optim.AdamW, groups, ratio=ratio, kernel=kernel, state_dtype=state_dtype
        )
        train(tier, space, groups, grad_scale=0.5)
        found = snapshot(tier, space)
        results.append({name: _covered(space, values) for name, values in found.items()})
    for result in results:
        assert_same(result, results[0])
    if state_dtype == "int8":
        assert tier.host_numel == space.numel - 42  # of 252: from 108, in the piece [42, 253)


def _covered(space: Space, values: Tensor) -> Tensor:
    """Without padding, of which a split master has no lower half where it is cut off."""
    return values[space.covered()] if values.numel() == space.numel else values


@pytest.mark.num_threads(2)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_large_odd_space_is_cut_at_an_element_without_a_trace(
    kernel: Any, ratio: float, end: str
) -> None:
    """100,003 elements: more than one thread's share in torch and in the kernel."""
    results = []
    for share in (1.0, ratio):
        space = _large_space()
        groups = [group_of(optim.AdamW, lr=1e-2)]
        tier = make_tier(space, optim.AdamW, groups, ratio=share, kernel=kernel, host_share=end)
        assert tier.host_numel == round(share * space.numel)
        train(tier, space, groups)
        results.append(snapshot(tier, space))
    assert_same(results[0], results[1])


def _large_space() -> Space:
    space = Space(dtype=torch.bfloat16)
    space.numel = 100_003
    space.initial = torch.randn(space.numel, generator=torch.Generator().manual_seed(1))
    space.pieces = [(0, 99_991, 0), (99_991, space.numel, 0)]
    space.params = [(0, space.initial.bfloat16())]
    return space
