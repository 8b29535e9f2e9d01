"""What a step touches, and with which settings: pieces, groups, scale, padding, offers."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from support import RATIOS, ReferenceAdam, Space, group_of, make_tier, offer, snapshot, train
from torch import optim

PLAIN: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


@pytest.fixture(params=["kernel", "torch"])
def route(request: pytest.FixtureRequest) -> Any:
    return ReferenceAdam() if request.param == "kernel" else None


@pytest.mark.parametrize("ratio", RATIOS)
def test_inactive_pieces_are_left_alone(route: Any, ratio: float) -> None:
    space = Space()
    groups = [group_of(optim.AdamW, **PLAIN)]
    tier = make_tier(space, optim.AdamW, groups, ratio=ratio, kernel=route)
    train(tier, space, groups, range(2))
    before = snapshot(tier, space)
    train(tier, space, groups, range(2, 4), active=[0, 2, 3])
    after = snapshot(tier, space)
    for i, (start, stop, _) in enumerate(space.pieces):
        for name in (*tier.state_names(), "params"):
            same = torch.equal(after[name][start:stop], before[name][start:stop])
            assert same == (i in (1, 4)), (i, name)
        assert tier.read_scalars(i)["num_steps"] == (2 if i in (1, 4) else 4)
        assert tier.read_scalars(i)["step"] == (2 if i in (1, 4) else 4)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_pieces_of_unequal_age_use_their_own_step_count(route: Any, ratio: float) -> None:
    """A piece that joins late is corrected as if it had trained alone."""
    space, late = Space(), Space()
    groups = [group_of(optim.AdamW, **PLAIN)]
    tier = make_tier(space, optim.AdamW, groups, ratio=ratio, kernel=route)
    train(tier, space, groups, range(2), active=[0, 2])
    train(tier, space, groups, range(2, 4))
    alone = make_tier(late, optim.AdamW, groups, kernel=route)
    train(alone, late, groups, range(2, 4))
    start, stop, _ = space.pieces[1]
    assert torch.equal(space.flat_params()[start:stop], late.flat_params()[start:stop])


class _RebindingAdam(optim.Adam):
    is_elementwise = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state = defaultdict(dict, {param: {**entry} for param, entry in self.state.items()})
        super().step(closure)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_an_optimizer_may_rebind_its_state(ratio: float) -> None:
    found = []
    for optimizer_class in (optim.Adam, _RebindingAdam):
        space, groups = Space(), [group_of(optim.Adam, **PLAIN)]
        tier = make_tier(space, optimizer_class, groups, ratio=ratio)
        train(tier, space, groups)
        found.append((snapshot(tier, space), [tier.read_scalars(i) for i in range(3)]))
    (expected, scalars), (rebound, others) = found
    assert scalars == others
    assert expected["exp_avg"].any()
    assert all(torch.equal(expected[name], rebound[name]) for name in expected)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_padding_keeps_its_values(route: Any, ratio: float) -> None:
    space = Space()
    groups = [group_of(optim.AdamW, **PLAIN)]
    tier = make_tier(space, optim.AdamW, groups, ratio=ratio, kernel=route)
    train(tier, space, groups)
    gaps = ~space.covered()
    assert torch.equal(space.flat_params()[gaps], space.initial[gaps])
    assert not tier.read_state("exp_avg", 0, space.numel)[gaps].any()


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_groups_differ_and_change_from_step_to_step(route: Any, ratio: float) -> None:
    space = Space(num_groups=2)
    groups = [group_of(optim.AdamW, **PLAIN), group_of(optim.AdamW, lr=3e-3, weight_decay=0.0)]
    tier = make_tier(space, optim.AdamW, groups, ratio=ratio, kernel=route)
    expected = Space(num_groups=2)
    params = [torch.nn.Parameter(expected.initial[a:b].clone()) for a, b, _ in expected.pieces]
    oracle = optim.AdamW(
        [
            {**groups[g], "params": [params[i] for i, p in enumerate(space.pieces) if p[2] == g]}
            for g in range(2)
        ]
    )
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
    space, same = Space(), Space()
    groups = [group_of(optim.SGD, lr=0.1)]
    tier, expected = make_tier(space, optim.SGD, groups), make_tier(same, optim.SGD, groups)
    train(expected, same, groups, range(1))
    offer(tier, space, 0)
    tier.step(groups, range(5), grad_scale=1.0)
    groups[0]["lr"] = 1e6  # a scheduler, while the worker may still be busy
    tier.wait_params(0, space.numel)
    assert torch.equal(space.flat_params(), same.flat_params())


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grad_scale_multiplies_the_gradient_in_fp32(
    route: Any, ratio: float, dtype: torch.dtype
) -> None:
    scaled, plain = Space(dtype=dtype), Space(dtype=dtype)
    groups = [group_of(optim.Adam, **PLAIN)]
    tier = make_tier(scaled, optim.Adam, groups, ratio=ratio, kernel=route)
    other = make_tier(plain, optim.Adam, groups, ratio=ratio, kernel=route)
    train(tier, scaled, groups, grad_scale=1 / 3)
    for step in range(4):
        grad = plain.grad(step).float() * (1 / 3)
        other.offer_grad(0, grad[:256])
        other.offer_grad(256, grad[256:])
        other.step(groups, range(5), grad_scale=1.0)
    other.wait_params(0, plain.numel)
    assert torch.equal(
        tier.read_state("master_weight", 0, 360), other.read_state("master_weight", 0, 360)
    )


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_discarded_gradients_leave_no_trace(route: Any, ratio: float) -> None:
    space, clean = Space(), Space()
    groups = [group_of(optim.AdamW, **PLAIN)]
    tier = make_tier(space, optim.AdamW, groups, ratio=ratio, kernel=route)
    other = make_tier(clean, optim.AdamW, groups, ratio=ratio, kernel=route)
    tier.offer_grad(0, torch.full((256,), float("inf")))
    tier.discard_grads()
    with pytest.raises(ValueError, match="no gradient was offered"):
        tier.step(groups, [0], grad_scale=1.0)
    train(tier, space, groups)
    train(other, clean, groups)
    assert torch.equal(space.flat_params(), clean.flat_params())


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_gradients_come_in_any_order_and_cut(route: Any, ratio: float) -> None:
    space, whole = Space(), Space()
    groups = [group_of(optim.AdamW, **PLAIN)]
    tier = make_tier(space, optim.AdamW, groups, ratio=ratio, kernel=route)
    other = make_tier(whole, optim.AdamW, groups, ratio=ratio, kernel=route)
    for step in range(3):
        grad = space.grad(step)
        tier.offer_grad(0, torch.full((50,), 9.0))  # replaced by the offers after it
        for a, b in ((200, 360), (0, 30), (100, 200), (30, 100)):
            tier.offer_grad(a, grad[a:b].clone())
        tier.step(groups, range(5), grad_scale=1.0)
    tier.wait_params(0, space.numel)
    train(other, whole, groups, range(3))
    assert torch.equal(space.flat_params(), whole.flat_params())


def test_one_kernel_call_per_run_of_pieces(reference: ReferenceAdam) -> None:
    space = Space(dtype=torch.bfloat16)
    groups = [group_of(optim.AdamW, **PLAIN)]
    tier = make_tier(space, optim.AdamW, groups, kernel=reference)
    train(tier, space, groups, range(1))
    assert reference.calls == [253, 1, 64]  # pieces 0-2 are adjacent; a gap parts 3 from 4
    reference.calls.clear()
    train(tier, space, groups, range(1, 2), active=[0, 2])
    assert reference.calls == [37, 211]
    reference.calls.clear()
    train(tier, space, groups, range(2, 3))
    assert reference.calls == [37, 5, 211, 1, 64]  # step counts differ now


def test_groups_with_equal_settings_share_a_kernel_call(reference: ReferenceAdam) -> None:
    space = Space(num_groups=2)
    groups = [group_of(optim.AdamW, **PLAIN), group_of(optim.AdamW, **PLAIN)]
    tier = make_tier(space, optim.AdamW, groups, kernel=reference)
    train(tier, space, groups, range(1))
    assert reference.calls == [253, 1, 64]
    groups[1]["lr"] = 0.5
    train(tier, space, groups, range(1, 2))
    assert reference.calls[3:] == [37, 5, 211, 1, 64]


def test_capturable_has_no_meaning_on_the_host_and_no_effect() -> None:
    space, plain = Space(), Space()
    groups = [group_of(optim.AdamW)]
    train(make_tier(plain, optim.AdamW, groups), plain, groups)
    capturable = [{**groups[0], "capturable": True}]
    train(make_tier(space, optim.AdamW, capturable, ratio=0.5), space, capturable)
    assert torch.equal(space.flat_params(), plain.flat_params())


def test_amsgrad_is_computed_by_torch_although_a_kernel_is_there(reference: ReferenceAdam) -> None:
    space = Space()
    groups = [group_of(optim.Adam, amsgrad=True)]
    tier = make_tier(space, optim.Adam, groups, kernel=reference)
    train(tier, space, groups)
    assert not reference.calls
    assert "max_exp_avg_sq" in tier.state_names()


def test_maximize_negates_the_gradient_for_the_kernel(reference: ReferenceAdam) -> None:
    space, plain = Space(), Space()
    groups = [group_of(optim.Adam, lr=1e-2, maximize=True)]
    tier = make_tier(space, optim.Adam, groups, kernel=reference)
    other = make_tier(plain, optim.Adam, groups)
    train(tier, space, groups)
    train(other, plain, groups)
    torch.testing.assert_close(space.flat_params(), plain.flat_params(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_float64_parameters_keep_float64_masters(ratio: float) -> None:
    space = Space(dtype=torch.float64)
    groups = [group_of(optim.AdamW, **PLAIN)]
    tier = make_tier(space, optim.AdamW, groups, ratio=ratio, kernel=ReferenceAdam())
    train(tier, space, groups)
    assert tier.read_state("master_weight", 0, 3).dtype == torch.float64
    param = torch.nn.Parameter(space.initial[:37].double())
    oracle = optim.AdamW([param], **PLAIN)
    for step in range(4):
        param.grad = space.grad(step)[:37]
        oracle.step()
    assert torch.equal(space.flat_params()[:37], param.detach())


@pytest.mark.parametrize("active", [[1, 0], [0, 0], [5], [-1]])
def test_unsorted_or_unknown_active_pieces_are_refused(active: list[int]) -> None:
    space = Space()
    groups = [group_of(optim.SGD, lr=0.1)]
    tier = make_tier(space, optim.SGD, groups)
    offer(tier, space, 0)
    with pytest.raises(ValueError, match="sorted, unique piece indices"):
        tier.step(groups, active, grad_scale=1.0)


def test_a_step_without_active_pieces_changes_nothing(route: Any) -> None:
    space = Space()
    groups = [group_of(optim.AdamW, **PLAIN)]
    tier = make_tier(space, optim.AdamW, groups, ratio=0.5, kernel=route)
    before = snapshot(tier, space)
    tier.step(groups, [], grad_scale=1.0)
    tier.wait_params(0, space.numel)
    for name, value in snapshot(tier, space).items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(
    "grad",
    [torch.zeros(2, 2), torch.zeros(8)[::2], torch.zeros(4, dtype=torch.int32), torch.zeros(999)],
)
def test_misshapen_gradients_are_refused(grad: torch.Tensor) -> None:
    space = Space()
    tier = make_tier(space, optim.SGD, [group_of(optim.SGD, lr=0.1)])
    with pytest.raises(ValueError, match=r"must be 1-D|not within the flat space"):
        tier.offer_grad(0, grad)
