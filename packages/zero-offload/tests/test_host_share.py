"""Selection of the host's elements by parameter name and by bytes of device memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from support.kernels import ReferenceAdam
from support.models import loop, weights
from support.tiers import (
    BF16,
    FP16,
    FP32,
    Space,
    assert_same,
    group_of,
    make_tier,
    snapshot,
    train,
    trained,
)
from torch import nn, optim

from zero_offload import OffloadedOptimizer
from zero_offload.flat.geometry import Geometry, Intervals
from zero_offload.footprint import tier_footprint
from zero_offload.tiers.shares import device_bytes
from zero_offload.tiers.twin import TwinTier

NAMES = ("embed.weight", "block.0.bias", "block.0.weight", "block.1.bias", "head.weight")
GROUPS = [group_of(optim.AdamW, lr=1e-2, weight_decay=0.1)]


def _make(space: Space, **options: Any) -> TwinTier:
    return make_tier(space, groups=GROUPS, names=NAMES, **options)


def _host_elements(tier: TwinTier) -> set[int]:
    return {e for p in tier.report() if p.is_host for span in p.spans for e in range(*span)}


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        # The padding behind block.0 is on the host too.
        ({"parameters": ["block.0.*"]}, {*range(37, 256 + 4)}),
        ({"parameters": ["*.bias", "head.weight"]}, {*range(37, 42), *range(260, 360)}),
        ({"parameters": ["*"]}, {*range(360)}),
        ({"parameters": ["HEAD.weight"]}, set()),
        ({"device_budget": 1234}, None),
    ],
)
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("kernel", [None, ReferenceAdam()])
def test_the_host_holds_the_named_parameters_and_no_bit_changes(
    block: dict[str, Any], expected: set[int] | None, dtype: torch.dtype, kernel: Any
) -> None:
    space = Space(dtype)
    tier = _make(space, kernel=kernel, **block)
    train(tier, space, GROUPS)
    assert_same(snapshot(tier, space), trained(groups=GROUPS, space=Space(dtype), kernel=kernel))
    if expected is not None:
        assert _host_elements(tier) == expected
    else:
        assert 0 < tier.host_numel < 360


def test_only_named_parameters_travel() -> None:
    space = Space(BF16)
    tier = _make(space, parameters=["block.0.bias", "head.*"])
    offered = tier.bytes_d2h
    train(tier, space, GROUPS, range(1))
    assert tier.bytes_d2h - offered == 2 * (5 + 88)  # includes the padding after the last piece


@pytest.mark.parametrize(
    ("cls", "settings", "dtype", "element_bytes"),
    [
        (optim.AdamW, {}, FP32, 8 + 4),  # moments and gradient, no separate master weight
        (optim.AdamW, {}, BF16, 4 + 8 + 2),  # master weight, moments and gradient
        (optim.AdamW, {"amsgrad": True}, BF16, 4 + 12 + 2),
        (optim.SGD, {"lr": 0.1}, FP32, 4),
        (optim.SGD, {"lr": 0.1, "momentum": 0.9}, FP16, 4 + 4 + 2),
    ],
)
@pytest.mark.parametrize("budget", [0, 999, 1000, 1001, 10**9])
def test_as_many_elements_stay_on_the_device_as_its_budget_holds(
    cls: Any, settings: dict[str, Any], dtype: torch.dtype, element_bytes: int, budget: int
) -> None:
    space = Space(dtype)
    groups = [group_of(cls, **settings)]
    tier = make_tier(space, cls, groups, device_budget=budget)
    num_on_device = min(budget // element_bytes, 360)
    assert tier.host_numel == 360 - num_on_device
    train(tier, space, groups, range(2))
    held = _device_bytes(tier)
    assert held == num_on_device * element_bytes <= budget or num_on_device == 360


def _device_bytes(tier: TwinTier) -> int:
    reports = [part.tier for part in tier.report() if not part.is_host]
    return sum(sum(report.memory.values()) for report in reports if report is not None)


@pytest.mark.parametrize(("dtype", "per_element"), [(FP32, 12), (BF16, 16)])
@pytest.mark.parametrize(
    ("budget", "end"), [(0, "first"), (999, "last"), (2800, "first"), (2800, "last")]
)
def test_a_budget_holds_the_sums_of_micro_steps(
    budget: int, end: str, dtype: torch.dtype, per_element: int
) -> None:
    space, block = Space(dtype), {"device_budget": budget, "host_share": end}
    tier = _make(space, micro_steps=4, **block)
    with pytest.raises(RuntimeError, match="call it before"):
        tier.expect_micro_steps(4)
    for k in range(4):
        tier.add_grad(0, space.grad(k), is_last=k == 3)
    tier.step(GROUPS, range(5), grad_scale=1.0)
    tier.wait_params(0, space.numel)
    assert budget - per_element < _device_bytes(tier) <= budget
    form = tier_footprint(
        numel=space.numel,
        pieces=space.pieces,
        params=[(start, shard.to("meta")) for start, shard in space.params],
        grad_dtypes=[dtype] * len(space.params),
        num_added=4,
        resting=(),
        is_accelerated=False,
        optimizer_class=optim.AdamW,
        groups=GROUPS,
        config={"offload_optimizer": {"device": "cpu", **block}},
        has_kernel=False,
        is_speculative=False,
    )
    ratio = form.planned_ratio([])
    assert round(ratio * space.numel) == tier.host_numel
    assert sum(form.device_bytes(ratio).values()) == _device_bytes(tier)


@pytest.mark.parametrize(
    ("numel", "adds_grads", "expected", "more"),
    [
        (1 << 20, True, (4 + 8 + 4) << 20, 0),  # a sum is fp32 already
        # An accelerator's tier converts 16-bit gradients to fp32, at most 64 Mi elements at once.
        (1 << 20, False, 14 << 20, 4 << 20),
        (1 << 28, False, 14 << 28, 4 << 26),
    ],
)
def test_gradients_that_are_widened_on_an_accelerator_count(
    numel: int, adds_grads: bool, expected: int, more: int
) -> None:
    shard = torch.empty(1 << 28, dtype=BF16, device="meta")
    geometry = Geometry(1 << 28, [(0, 1 << 28, 0)], [(0, shard)], 1)
    for is_accelerated in (False, True):
        keys = {"is_accelerated": is_accelerated, "adds_grads": adds_grads}
        found = device_bytes(geometry, Intervals([(0, numel)]), 8, **keys)
        assert found == expected + more * is_accelerated


def _net() -> Any:
    """Make a model with named layers and an empty parameter."""
    torch.manual_seed(0)
    parts = {"embed": nn.Linear(7, 7), "relu": nn.ReLU(), "head": nn.Linear(7, 3)}
    net = nn.Sequential(OrderedDict(parts))
    net.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    return net


MAKERS: dict[str, Any] = {
    "pattern": lambda net: (net.named_parameters(), ["head.*"]),
    "groups": lambda net: (
        [
            {"params": net.embed.named_parameters(prefix="embed")},
            {"params": [("empty", net.empty)]},
            {"params": net.head.named_parameters(prefix="head")},
        ],
        ["head.weight", "*.bias", "empty"],
    ),
    "set": lambda net: (net.parameters(), {net.head.weight, net.head.bias}),
}


@pytest.mark.parametrize(("name", "host_numel"), [("pattern", 24), ("groups", 31), ("set", 24)])
def test_an_optimizer_takes_names_or_parameters(name: str, host_numel: int) -> None:
    plain, net = _net(), _net()
    loop(plain, optim.NAdam(plain.parameters(), lr=1e-2))
    params, chosen = MAKERS[name](net)
    optimizer = OffloadedOptimizer(optim.NAdam, params, parameters=chosen, lr=1e-2)
    loop(net, optimizer)
    assert torch.equal(weights(net), weights(plain))
    assert optimizer.tier.host_numel == host_numel
    if name == "pattern":  # The state_dict also loads into an optimizer with a ratio.
        saved = optimizer.state_dict()
        second = OffloadedOptimizer(optim.NAdam, _net().parameters(), ratio=0.3, lr=1e-1)
        second.load_state_dict(saved)
        found = second.state_dict()["state"]
        for i, entry in saved["state"].items():
            assert_same(
                {k: torch.as_tensor(v) for k, v in found[i].items()},
                {k: torch.as_tensor(v) for k, v in entry.items()},
            )


def test_shares_that_cannot_be_are_refused_by_name() -> None:
    net = _net()

    def make(params: Any, **keys: Any) -> None:
        OffloadedOptimizer(optim.SGD, params, lr=0.1, **keys)

    with pytest.raises(ValueError, match=r"'heat\.\*' matches no parameter; near it are \['head"):
        make(net.named_parameters(), parameters=["head.*", "heat.*"])
    with pytest.raises(
        ValueError, match=r"0 of 4 parameters are named: give model\.named_parameters"
    ):
        make(net.parameters(), parameters=["head.*"])
    with pytest.raises(ValueError, match="ratio and parameters each say"):
        make(net.named_parameters(), parameters=["head.*"], ratio=0.5)
    with pytest.raises(ValueError, match="ratio and parameters each say"):
        make(net.parameters(), parameters={net.head.weight}, ratio=0.5)
    with pytest.raises(ValueError, match="ratio and device_budget each say"):
        make(net.parameters(), device_budget=100, ratio=0.5)
    with pytest.raises(ValueError, match="not among the optimizer's parameters"):
        make(net.head.parameters(), parameters={net.head.weight, net.embed.weight})
    with pytest.raises(ValueError, match="not among the optimizer's parameters"):
        make(net.parameters(), parameters=[nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="must be a list of patterns"):
        make(net.named_parameters(), parameters="head.*")
