"""Which elements the host holds: by parameter name and by bytes of device memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernels import ReferenceAdam
from support.tiers import CPU, RATIOS, Space, assert_same, group_of, snapshot, train
from torch import Tensor, nn, optim

from zero_offload import OffloadedOptimizer
from zero_offload.flat.geometry import Geometry
from zero_offload.flat.intervals import Intervals
from zero_offload.footprint import tier_footprint
from zero_offload.tier import create_tier, make_device_tier
from zero_offload.tiers.share import device_bytes
from zero_offload.tiers.twin import TwinTier

NAMES = ("embed.weight", "block.0.bias", "block.0.weight", "block.1.bias", "head.weight")
GROUPS = [group_of(optim.AdamW, lr=1e-2, weight_decay=0.1)]


def _make(
    space: Space, cls: Any = optim.AdamW, kernel: Any = None, groups: Any = GROUPS, **block: Any
) -> TwinTier:
    tier = create_tier(
        numel=space.numel,
        pieces=space.pieces,
        params=space.params,
        device=CPU,
        optimizer_class=cls,
        groups=groups,
        config={"offload_optimizer": {"device": "cpu", **block}},
        adam_kernel=kernel,
        device_tier=make_device_tier,
        names=NAMES,
    )
    tier.write_state("master_weight", 0, space.initial)
    return tier


def _host_elements(tier: TwinTier) -> set[int]:
    return {e for p in tier.report() if p.is_host for span in p.spans for e in range(*span)}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["block.0.*"], {*range(37, 256 + 4)}),  # with the padding up to the next piece
        (["*.bias", "head.weight"], {*range(37, 42), *range(260, 360)}),
        (["*"], {*range(360)}),
        (["HEAD.weight"], set()),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_kernel", [False, True])
def test_the_host_holds_the_named_parameters_and_no_bit_changes(
    patterns: list[str], expected: set[int], dtype: torch.dtype, has_kernel: bool
) -> None:
    results = []
    for block in ({"ratio": 1.0}, {"parameters": patterns}):
        space = Space(dtype=dtype)
        kernel = ReferenceAdam() if has_kernel else None
        tier = _make(space, kernel=kernel, **block)
        train(tier, space, GROUPS)
        results.append(snapshot(tier, space))
    assert_same(results[1], results[0])
    assert _host_elements(tier) == expected


def test_only_named_parameters_travel() -> None:
    space = Space(dtype=torch.bfloat16)
    tier = _make(space, parameters=["block.0.bias", "head.*"])
    offered = tier.bytes_d2h
    train(tier, space, GROUPS, range(1))
    assert tier.bytes_d2h - offered == 2 * (5 + 88)  # the padding after the last piece with it


def test_state_crosses_from_names_to_any_ratio_and_back() -> None:
    named, expected = Space(), Space()
    first, straight = _make(named, parameters=["*bias"]), _make(expected, ratio=1.0)
    train(first, named, GROUPS, range(3))
    train(straight, expected, GROUPS, range(6))
    for ratio in RATIOS:
        space, back = Space(), Space()
        middle, last = _make(space, ratio=ratio), _make(back, parameters=["*weight"])
        for source, target in ((first, middle), (middle, last)):
            for name in source.state_names():
                target.write_state(name, 0, source.read_state(name, 0, 360))
            for i in range(5):
                target.write_scalars(i, source.read_scalars(i))
        train(last, back, GROUPS, range(3, 6))
        assert_same(snapshot(last, back), snapshot(straight, expected))


@pytest.mark.parametrize(
    ("cls", "settings", "dtype", "element_bytes"),
    [
        (optim.AdamW, {}, torch.float32, 8 + 4),  # moments, a gradient; the weight is its own
        (optim.AdamW, {}, torch.bfloat16, 4 + 8 + 2),  # master, moments, a gradient
        (optim.AdamW, {"amsgrad": True}, torch.bfloat16, 4 + 12 + 2),
        (optim.SGD, {"lr": 0.1}, torch.float32, 4),
        (optim.SGD, {"lr": 0.1, "momentum": 0.9}, torch.float16, 4 + 4 + 2),
    ],
)
@pytest.mark.parametrize("budget", [0, 1, 999, 1000, 1001, 10**9])
def test_as_many_elements_stay_on_the_device_as_its_budget_holds(
    cls: Any, settings: dict[str, Any], dtype: torch.dtype, element_bytes: int, budget: int
) -> None:
    space = Space(dtype=dtype)
    groups = [group_of(cls, **settings)]
    tier = _make(space, cls, groups=groups, device_budget=budget)
    num_on_device = min(budget // element_bytes, 360)
    assert tier.host_numel == 360 - num_on_device
    train(tier, space, groups, range(2))
    reports = [part.tier for part in tier.report() if not part.is_host]
    held = sum(sum(report.memory.values()) for report in reports if report is not None)
    assert held == num_on_device * element_bytes <= budget or num_on_device == 360


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("end", ["first", "last"])
@pytest.mark.parametrize("budget", [0, 999, 2800])
def test_a_budget_holds_the_sums_of_micro_steps(budget: int, end: str, dtype: torch.dtype) -> None:
    space = Space(dtype=dtype)
    block = {"device": "cpu", "device_budget": budget, "host_share": end}
    keys: dict[str, Any] = {
        "numel": space.numel,
        "pieces": space.pieces,
        "optimizer_class": optim.AdamW,
        "groups": GROUPS,
        "config": {"offload_optimizer": block},
    }
    tier = create_tier(
        params=space.params, device=CPU, adam_kernel=None, device_tier=make_device_tier, **keys
    )
    tier.expect_micro_steps(4)
    tier.write_state("master_weight", 0, space.initial)
    with pytest.raises(RuntimeError, match="call it before"):
        tier.expect_micro_steps(4)
    for k in range(4):
        tier.add_grad(0, space.grad(k), is_last=k == 3)
    tier.step(GROUPS, range(5), grad_scale=1.0)
    tier.wait_params(0, space.numel)
    reports = [part.tier for part in tier.report() if not part.is_host]
    held = sum(sum(report.memory.values()) for report in reports if report is not None)
    per_element = 12 if dtype == torch.float32 else 16
    assert budget - per_element < held <= budget
    form = tier_footprint(
        params=[(start, shard.to("meta")) for start, shard in space.params],
        grad_dtypes=[dtype] * len(space.params),
        num_added=4,
        resting=(),
        is_accelerated=False,
        has_kernel=False,
        is_speculative=False,
        **keys,
    )
    ratio = form.planned_ratio([])
    assert round(ratio * space.numel) == tier.host_numel
    assert sum(form.device_bytes(ratio).values()) == held


def test_a_sum_is_wide_already_on_an_accelerator() -> None:
    shard = torch.empty(1 << 20, dtype=torch.bfloat16, device="meta")
    geometry = Geometry(1 << 20, [(0, 1 << 20, 0)], [(0, shard)], 1)
    share = Intervals([(0, 1 << 20)])
    for is_accelerated in (False, True):
        found = device_bytes(geometry, share, 8, is_accelerated=is_accelerated, adds_grads=True)
        assert found == (4 + 8 + 4) << 20


def test_a_budget_changes_no_bit() -> None:
    results = []
    for block in ({"ratio": 1.0}, {"device_budget": 1234}):
        space = Space(dtype=torch.bfloat16)
        tier = _make(space, kernel=ReferenceAdam(), **block)
        train(tier, space, GROUPS)
        results.append(snapshot(tier, space))
    assert 0 < tier.host_numel < 360
    assert_same(results[1], results[0])


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(5, 7)
        self.empty = nn.Parameter(torch.zeros(0))
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(x).relu())
        return out


def _run(make: Any) -> tuple[Any, list[Tensor]]:
    net = _Net()
    optimizer = make(net)
    for step in range(5):
        optimizer.zero_grad()
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        net(x).square().mean().backward()
        optimizer.step()
    return optimizer, [p.detach() for p in net.parameters()]


def test_an_optimizer_takes_names_or_parameters() -> None:
    _, expected = _run(lambda net: optim.NAdam(net.parameters(), lr=1e-2))
    makers = {
        "pattern": lambda net: OffloadedOptimizer(
            optim.NAdam, net.named_parameters(), parameters=["head.*"], lr=1e-2
        ),
        "groups": lambda net: OffloadedOptimizer(
            optim.NAdam,
            [
                {"params": net.embed.named_parameters(prefix="embed")},
                {"params": [("empty", net.empty)]},
                {"params": net.head.named_parameters(prefix="head")},
            ],
            parameters=["head.weight", "*.bias", "empty"],
            lr=1e-2,
        ),
        "set": lambda net: OffloadedOptimizer(
            optim.NAdam, net.parameters(), parameters={net.head.weight, net.head.bias}, lr=1e-2
        ),
    }
    for name, make in makers.items():
        optimizer, found = _run(make)
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine, theirs)
        numel = 24 if name != "groups" else 24 + 7
        assert optimizer.tier.host_numel == numel


def test_a_state_dict_crosses_from_names_to_a_ratio() -> None:
    first, _ = _run(
        lambda net: OffloadedOptimizer(
            optim.AdamW, net.named_parameters(), parameters=["head.*"], lr=1e-2
        )
    )
    second, _ = _run(
        lambda net: OffloadedOptimizer(optim.AdamW, net.parameters(), ratio=0.3, lr=1e-1)
    )
    saved = first.state_dict()
    second.load_state_dict(saved)
    for a, b in zip(saved["state"].values(), second.state_dict()["state"].values(), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)


def test_shares_that_cannot_be_are_refused_by_name() -> None:
    net = _Net()

    def make(params: Any, **keys: Any) -> None:
        OffloadedOptimizer(optim.SGD, params, lr=0.1, **keys)

    with pytest.raises(ValueError, match=r"'heat\.\*' matches no parameter; near it are \['head"):
        make(net.named_parameters(), parameters=["head.*", "heat.*"])
    with pytest.raises(ValueError, match=r"named parameters \(model\.named_parameters"):
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
    with pytest.raises(ValueError, match="cannot be offloaded"):
        OffloadedOptimizer(optim.LBFGS, net.parameters(), device_budget=100)


def test_gradients_that_are_widened_on_an_accelerator_count() -> None:
    """Its tier widens 16-bit gradients to fp32, 64 Mi elements at once."""
    shard = torch.empty(1 << 28, dtype=torch.bfloat16, device="meta")
    geometry = Geometry(1 << 28, [(0, 1 << 28, 0)], [(0, shard)], 1)
    for numel, widened in ((1 << 20, 1 << 20), (1 << 28, 1 << 26)):
        share = Intervals([(0, numel)])
        on_host, on_device = (
            device_bytes(geometry, share, 8, is_accelerated=is_accelerated)
            for is_accelerated in (False, True)
        )
        assert on_host == 14 * numel
        assert on_device == on_host + 4 * widened
