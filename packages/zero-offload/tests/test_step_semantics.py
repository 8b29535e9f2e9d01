"""Effects of a step: pieces, groups, gradient scale, padding and offered gradients."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from support.kernels import ReferenceAdam
from support.tiers import (
    BF16,
    FP16,
    FP32,
    RATIOS,
    Space,
    assert_same,
    group_of,
    make_tier,
    offer,
    snapshot,
    train,
    trained,
)
from torch import optim

PLAIN: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
GROUPS = [group_of(optim.AdamW, **PLAIN)]
SGD_TIER = (optim.SGD, [group_of(optim.SGD, lr=0.1)])
some_ratios = pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])


@pytest.fixture(params=["kernel", "torch"])
def route(request: pytest.FixtureRequest) -> Any:
    return ReferenceAdam() if request.param == "kernel" else None


@pytest.mark.parametrize("ratio", RATIOS)
def test_inactive_pieces_and_padding_are_left_alone(route: Any, ratio: float) -> None:
    space = Space()
    tier = make_tier(space, groups=GROUPS, ratio=ratio, kernel=route)
    train(tier, space, GROUPS, range(2))
    before = snapshot(tier, space)
    train(tier, space, GROUPS, range(2, 4), active=[0, 2, 3])
    tier.step(GROUPS, [], grad_scale=1.0)
    after = snapshot(tier, space)
    for i, (start, stop, _) in enumerate(space.pieces):
        for name in (*tier.state_names(), "params"):
            same = torch.equal(after[name][start:stop], before[name][start:stop])
            assert same == (i in (1, 4)), (i, name)
        assert tier.read_scalars(i)["num_steps"] == (2 if i in (1, 4) else 4)
        assert tier.read_scalars(i)["step"] == (2 if i in (1, 4) else 4)
    gaps = ~space.covered()
    assert torch.equal(space.flat_params()[gaps], space.initial[gaps])
    assert not after["exp_avg"][gaps].any()


@some_ratios
def test_pieces_of_unequal_age_use_their_own_step_count(route: Any, ratio: float) -> None:
    space = Space()
    tier = make_tier(space, groups=GROUPS, ratio=ratio, kernel=route)
    train(tier, space, GROUPS, range(2), active=[0, 2])
    train(tier, space, GROUPS, range(2, 4))
    alone = trained(groups=GROUPS, steps=range(2, 4), kernel=route)
    start, stop, _ = space.pieces[1]
    assert torch.equal(space.flat_params()[start:stop], alone["params"][start:stop])


class _RebindingAdam(optim.Adam):
    is_elementwise = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state = defaultdict(dict, {param: {**entry} for param, entry in self.state.items()})
        super().step(closure)


@some_ratios
def test_an_optimizer_may_rebind_its_state(ratio: float) -> None:
    groups = [group_of(optim.Adam, **PLAIN)]
    expected = trained(optim.Adam, groups, ratio=ratio)
    assert expected["exp_avg"].any()
    assert_same(trained(_RebindingAdam, groups, ratio=ratio), expected)


@some_ratios
def test_groups_differ_and_change_from_step_to_step(route: Any, ratio: float) -> None:
    space = Space(num_groups=2)
    groups = [GROUPS[0].copy(), group_of(optim.AdamW, lr=3e-3, weight_decay=0.0)]
    params = [torch.nn.Parameter(space.initial[a:b].clone()) for a, b, _ in space.pieces]
    members = [[params[i] for i, p in enumerate(space.pieces) if p[2] == g] for g in range(2)]
    oracle = optim.AdamW([{**groups[g], "params": members[g]} for g in range(2)])
    tier = make_tier(space, groups=groups, ratio=ratio, kernel=route)
    for step in range(4):
        for group in (*groups, *oracle.param_groups):
            group["lr"] *= 0.5
        train(tier, space, groups, range(step, step + 1))
        for param, (a, b, _) in zip(params, space.pieces, strict=True):
            param.grad = space.grad(step)[a:b].clone()
        oracle.step()
    found = space.flat_params()
    for param, (a, b, _) in zip(params, space.pieces, strict=True):
        torch.testing.assert_close(found[a:b], param.detach(), rtol=1e-6, atol=1e-6)


def test_settings_are_copied_before_step_returns() -> None:
    space, groups = Space(), [group_of(optim.SGD, lr=0.1)]
    tier = make_tier(space, optim.SGD, groups)
    offer(tier, space, 0)
    tier.step(groups, range(5), grad_scale=1.0)
    groups[0]["lr"] = 1e6  # as a scheduler may do while the worker updates
    assert_same(snapshot(tier, space), trained(*SGD_TIER, steps=range(1)))


@some_ratios
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_grad_scale_multiplies_the_gradient_in_fp32(
    route: Any, ratio: float, dtype: torch.dtype
) -> None:
    space, groups = Space(dtype), [group_of(optim.Adam, **PLAIN)]
    tier = make_tier(space, optim.Adam, groups, ratio=ratio, kernel=route)
    for step in range(4):
        tier.offer_grad(0, space.grad(step).float() * (1 / 3))
        tier.step(groups, range(5), grad_scale=1.0)
    options: dict[str, Any] = {"ratio": ratio, "kernel": route, "grad_scale": 1 / 3}
    expected = trained(optim.Adam, groups, space=Space(dtype), **options)
    assert_same(snapshot(tier, space), expected)


@some_ratios
def test_gradients_come_in_any_order_cut_replaced_and_discarded(route: Any, ratio: float) -> None:
    space = Space()
    tier = make_tier(space, groups=GROUPS, ratio=ratio, kernel=route)
    tier.offer_grad(0, torch.full((256,), float("inf")))
    tier.discard_grads()
    with pytest.raises(ValueError, match="no gradient was offered"):
        tier.step(GROUPS, [0], grad_scale=1.0)
    for step in range(3):
        grad = space.grad(step)
        tier.offer_grad(0, torch.full((50,), 9.0))  # later offers replace this gradient
        for a, b in ((200, 360), (0, 30), (100, 200), (30, 100)):
            tier.offer_grad(a, grad[a:b].clone())
        tier.step(GROUPS, range(5), grad_scale=1.0)
    expected = trained(groups=GROUPS, steps=range(3), ratio=ratio, kernel=route)
    assert_same(snapshot(tier, space), expected)


def test_one_kernel_call_per_run_of_pieces() -> None:
    space, kernel = Space(BF16), ReferenceAdam()
    tier = make_tier(space, groups=GROUPS, kernel=kernel)
    train(tier, space, GROUPS, range(1))
    assert kernel.calls == [253, 1, 64]  # pieces 0 to 2 are adjacent, 3 and 4 are not
    train(tier, space, GROUPS, range(1, 2), active=[0, 2])
    assert kernel.calls[3:] == [37, 211]
    train(tier, space, GROUPS, range(2, 3))
    assert kernel.calls[5:] == [37, 5, 211, 1, 64]  # unequal step counts are not merged
    border, kernel = Space(BF16), ReferenceAdam()
    border.pieces[2:4] = [(42, 256, 0), (256, 261, 0)]  # adjacent pieces in different shards
    train(make_tier(border, groups=GROUPS, kernel=kernel), border, GROUPS, range(1))
    assert kernel.calls == [256, 5, 64]


def test_groups_with_equal_settings_share_a_kernel_call() -> None:
    space, kernel = Space(num_groups=2), ReferenceAdam()
    groups = [group_of(optim.AdamW, **PLAIN), group_of(optim.AdamW, **PLAIN)]
    tier = make_tier(space, optim.AdamW, groups, kernel=kernel)
    train(tier, space, groups, range(1))
    assert kernel.calls == [253, 1, 64]
    groups[1]["lr"] = 0.5
    train(tier, space, groups, range(1, 2))
    assert kernel.calls[3:] == [37, 5, 211, 1, 64]


def test_capturable_has_no_meaning_on_the_host_and_no_effect() -> None:
    groups = [group_of(optim.AdamW)]
    capturable = [{**groups[0], "capturable": True}]
    assert_same(trained(groups=capturable, ratio=0.5), trained(groups=groups))


@some_ratios
def test_float64_parameters_keep_float64_masters(ratio: float) -> None:
    space = Space(torch.float64)
    found = trained(groups=GROUPS, space=space, ratio=ratio, kernel=ReferenceAdam())
    assert found["master_weight"].dtype == torch.float64
    param = torch.nn.Parameter(space.initial[:37].double())
    oracle = optim.AdamW([param], **PLAIN)
    for step in range(4):
        param.grad = space.grad(step)[:37]
        oracle.step()
    assert torch.equal(found["params"][:37], param.detach())


@pytest.mark.parametrize("active", [[1, 0], [0, 0], [5], [-1]])
def test_unsorted_or_unknown_active_pieces_are_refused(active: list[int]) -> None:
    tier = make_tier(space := Space(), *SGD_TIER)
    offer(tier, space, 0)
    with pytest.raises(ValueError, match="sorted, unique piece indices"):
        tier.step(SGD_TIER[1], active, grad_scale=1.0)


@pytest.mark.parametrize(
    "grad",
    [torch.zeros(2, 2), torch.zeros(8)[::2], torch.zeros(4, dtype=torch.int32), torch.zeros(999)],
)
def test_misshapen_gradients_are_refused(grad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"must be 1-D|not within the flat space"):
        make_tier(Space(), *SGD_TIER).offer_grad(0, grad)
