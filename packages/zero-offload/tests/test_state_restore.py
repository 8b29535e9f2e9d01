"""State copied from one tier to another, at any ratio and in any order, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernels import NamedLion, ReferenceAdam, ReferenceKernel
from support.tiers import (
    BF16,
    FP16,
    FP32,
    RATIOS,
    Space,
    assert_same,
    copy_state,
    group_of,
    make_tier,
    snapshot,
    train,
    trained,
)
from torch import optim

SGD = {"lr": 0.1, "momentum": 0.9}
ADAGRAD = {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.2}
CASES: list[tuple[Any, dict[str, Any], Any]] = [
    (optim.AdamW, {"lr": 1e-2}, ReferenceAdam()),
    (optim.AdamW, {"lr": 1e-2}, None),
    (optim.SGD, {**SGD, "dampening": 0.2}, None),
    (optim.NAdam, {}, None),
    (optim.ASGD, {"t0": 1}, None),
    (optim.Adagrad, {"initial_accumulator_value": 0.2}, None),
    (optim.Rprop, {}, None),
    (optim.Adam, {"amsgrad": True}, None),
]
SGD_TIER = (optim.SGD, [group_of(optim.SGD, lr=0.1)])


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("scalars_first", [False, True])
@pytest.mark.parametrize(("cls", "settings", "kernel"), CASES)
def test_training_goes_on_bit_identically_at_another_ratio(
    cls: Any, settings: dict[str, Any], kernel: Any, scalars_first: bool, ratio: float
) -> None:
    groups = [group_of(cls, **settings)]
    space, resumed = Space(BF16), Space(BF16)
    tier = make_tier(space, cls, groups, ratio=0.4, kernel=kernel)
    train(tier, space, groups, range(2))
    train(tier, space, groups, range(2, 4), active=[0, 2, 3])  # pieces 1 and 4 have fewer steps
    other = make_tier(resumed, cls, groups, ratio=ratio, kernel=kernel)
    train(other, resumed, groups, range(9, 10))  # earlier state must be overwritten
    copy_state(tier, other, space, [100, 101], scalars_first=scalars_first)
    assert_same(snapshot(other, resumed), snapshot(tier, space))
    train(tier, space, groups, range(4, 7))
    train(other, resumed, groups, range(4, 7))
    assert_same(snapshot(other, resumed), snapshot(tier, space))


@pytest.mark.parametrize("ratio", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(("cls", "settings", "kernel"), CASES)
def test_num_steps_of_zero_makes_a_piece_new(
    cls: Any, settings: dict[str, Any], kernel: Any, ratio: float
) -> None:
    groups, space = [group_of(cls, **settings)], Space()
    tier = make_tier(space, cls, groups, ratio=ratio, kernel=kernel)
    train(tier, space, groups)
    for i in space.every:
        tier.write_scalars(i, {"num_steps": 0})
        assert tier.read_scalars(i) == {"num_steps": 0}
    tier.write_state("master_weight", 0, space.initial)
    train(tier, space, groups, range(3))
    expected = trained(cls, groups, steps=range(3), ratio=ratio, kernel=kernel)
    assert_same(snapshot(tier, space), expected)


@pytest.mark.parametrize("to_kernel", [True, False])
@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (optim.AdamW, {"lr": 1e-2}),
        (optim.SGD, {"lr": 0.1}),
        (optim.SGD, {**SGD, "dampening": 0.3}),
        (optim.SGD, {**SGD, "maximize": True}),
        (optim.Adagrad, ADAGRAD),
        (NamedLion, {"lr": 1e-2, "weight_decay": 0.1}),
    ],
)
def test_state_crosses_between_kernel_and_torch(
    cls: Any, settings: dict[str, Any], to_kernel: bool
) -> None:
    """Names, scalars and the state of a piece without updates are equal in both tiers."""
    groups, kernels = [group_of(cls, **settings)], [None, ReferenceKernel()]
    space, resumed = Space(), Space()
    tier = make_tier(space, cls, groups, kernel=kernels[not to_kernel], ratio=0.4)
    other = make_tier(resumed, cls, groups, kernel=kernels[to_kernel])
    assert_same(snapshot(other, resumed), snapshot(tier, space))
    train(tier, space, groups, active=[0, 2, 3])
    copy_state(tier, other, space)
    assert_same(snapshot(other, resumed), snapshot(tier, space))
    train(tier, space, groups, range(4, 6))
    train(other, resumed, groups, range(4, 6))
    tolerance = 0 if cls in (optim.SGD, NamedLion) else 1e-6
    for name, values in snapshot(other, resumed).items():
        expected = snapshot(tier, space)[name]
        torch.testing.assert_close(values, expected, rtol=tolerance, atol=tolerance)


def test_step_is_inferred_where_a_checkpoint_has_only_num_steps() -> None:
    tier = make_tier(Space(), ratio=0.5)
    tier.write_scalars(2, {"num_steps": 7})
    assert tier.read_scalars(2) == {"num_steps": 7, "step": 7.0}


def test_names_are_known_before_the_first_step_and_reads_are_copies() -> None:
    space = Space()
    groups = [group_of(optim.RMSprop, momentum=0.9)]
    tier = make_tier(space, optim.RMSprop, groups, ratio=0.5)
    assert tuple(tier.state_names()) == ("master_weight", "square_avg", "momentum_buffer")
    assert not tier.read_state("square_avg", 0, space.numel).any()
    for _ in range(2):
        found = tier.read_state("master_weight", 0, space.numel)
        assert torch.equal(found, space.initial)
        found.zero_()


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_unknown_states_are_key_errors(ratio: float) -> None:
    tier = make_tier(Space(), *SGD_TIER, ratio=ratio)
    with pytest.raises(KeyError, match="exp_avg"):
        tier.read_state("exp_avg", 0, 10)
    with pytest.raises(KeyError, match="exp_avg"):
        tier.write_state("exp_avg", 0, torch.zeros(10))
    with pytest.raises(KeyError, match="exp_avg"):
        tier.check_states(["exp_avg"], [tier.read_scalars(i) for i in range(5)])


@pytest.mark.parametrize(
    ("scalars", "match"),
    [
        ({}, "num_steps"),
        ({"num_steps": -1}, "num_steps"),
        ({"num_steps": 1.5}, "num_steps"),
        ({"num_steps": 2}, "mu_product"),
        ({"num_steps": 2, "mu_product": 0.9, "eta": 1.0}, "eta"),
    ],
)
@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_foreign_scalars_are_refused(scalars: dict[str, float], match: str, ratio: float) -> None:
    tier = make_tier(Space(), optim.NAdam, [group_of(optim.NAdam)], ratio=ratio)
    own = [tier.read_scalars(i) for i in range(5)]
    tier.check_states(tier.state_names(), own)
    with pytest.raises(ValueError, match=match):
        tier.check_states(tier.state_names(), [*own[:-1], scalars])
    with pytest.raises(ValueError, match=match):
        tier.write_scalars(len(own) - 1, scalars)
    assert [tier.read_scalars(i) for i in range(5)] == own


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("ratio", RATIOS)
def test_a_written_master_reaches_the_parameters_rounded(ratio: float, dtype: torch.dtype) -> None:
    space = Space(dtype)
    tier = make_tier(space, *SGD_TIER, ratio=ratio)
    expected, values = space.flat_params(), torch.linspace(-3, 3, 201)
    tier.write_state("master_weight", 99, values)
    expected[99:300] = values.to(dtype)
    assert torch.equal(tier.read_state("master_weight", 99, 300), values)
    assert torch.equal(space.flat_params(), expected)
