"""State leaves a tier and enters another one, at any ratio and by any route, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import RATIOS, ReferenceAdam, Space, assert_same, group_of, make_tier, snapshot, train
from torch import optim

from zero_offload.tiers.twin import TwinTier

CASES = [
    pytest.param(optim.AdamW, {"lr": 1e-2}, True, id="adamw-kernel"),
    pytest.param(optim.AdamW, {"lr": 1e-2}, False, id="adamw"),
    pytest.param(optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2}, False, id="sgd"),
    pytest.param(optim.NAdam, {}, False, id="nadam"),
    pytest.param(optim.ASGD, {"t0": 1}, False, id="asgd"),
    pytest.param(optim.Adagrad, {"initial_accumulator_value": 0.2}, False, id="adagrad"),
    pytest.param(optim.Rprop, {}, False, id="rprop"),
    pytest.param(optim.Adam, {"amsgrad": True}, False, id="amsgrad"),
]


def _copy(source: TwinTier, target: TwinTier, space: Space, *, scalars_first: bool) -> None:
    def scalars() -> None:
        for i in range(len(space.pieces)):
            target.write_scalars(i, source.read_scalars(i))

    if scalars_first:
        scalars()
    for name in source.state_names():
        for start, stop in ((0, 100), (100, 101), (101, space.numel)):  # ranges of any size
            target.write_state(name, start, source.read_state(name, start, stop))
    if not scalars_first:
        scalars()


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("scalars_first", [False, True])
@pytest.mark.parametrize(("cls", "settings", "has_kernel"), CASES)
def test_training_goes_on_bit_identically_at_another_ratio(
    cls: Any, settings: dict[str, Any], has_kernel: bool, scalars_first: bool, ratio: float
) -> None:
    kernel = ReferenceAdam() if has_kernel else None
    groups = [group_of(cls, **settings)]
    space, resumed = Space(dtype=torch.bfloat16), Space(dtype=torch.bfloat16)
    tier = make_tier(space, cls, groups, ratio=0.4, kernel=kernel)
    train(tier, space, groups, range(2))
    train(tier, space, groups, range(2, 4), active=[0, 2, 3])  # pieces 1 and 4 fall behind
    other = make_tier(resumed, cls, groups, ratio=ratio, kernel=kernel)
    train(other, resumed, groups, range(9, 10))  # what is there before must not matter
    _copy(tier, other, space, scalars_first=scalars_first)
    assert_same(snapshot(other, resumed), snapshot(tier, space))
    train(tier, space, groups, range(4, 7))
    train(other, resumed, groups, range(4, 7))
    assert_same(snapshot(other, resumed), snapshot(tier, space))


@pytest.mark.parametrize("ratio", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(("cls", "settings", "has_kernel"), CASES)
def test_num_steps_of_zero_makes_a_piece_new(
    cls: Any, settings: dict[str, Any], has_kernel: bool, ratio: float
) -> None:
    kernel = ReferenceAdam() if has_kernel else None
    groups = [group_of(cls, **settings)]
    space, fresh = Space(), Space()
    tier = make_tier(space, cls, groups, ratio=ratio, kernel=kernel)
    other = make_tier(fresh, cls, groups, ratio=ratio, kernel=kernel)
    train(tier, space, groups)
    for i in range(len(space.pieces)):
        tier.write_scalars(i, {"num_steps": 0})
        assert tier.read_scalars(i) == {"num_steps": 0}
    tier.write_state("master_weight", 0, space.initial)
    for result, where in ((tier, space), (other, fresh)):
        train(result, where, groups, range(3))
    assert_same(snapshot(tier, space), snapshot(other, fresh))


@pytest.mark.parametrize(("source", "target"), [(True, False), (False, True)])
def test_adam_state_crosses_between_kernel_and_torch(source: bool, target: bool) -> None:
    groups = [group_of(optim.AdamW, lr=1e-2)]
    space, other_space = Space(), Space()
    tier = make_tier(space, optim.AdamW, groups, kernel=ReferenceAdam() if source else None)
    other = make_tier(
        other_space, optim.AdamW, groups, ratio=0.5, kernel=ReferenceAdam() if target else None
    )
    train(tier, space, groups)
    _copy(tier, other, space, scalars_first=False)
    assert_same(snapshot(other, other_space), snapshot(tier, space))
    train(tier, space, groups, range(4, 6))
    train(other, other_space, groups, range(4, 6))
    torch.testing.assert_close(space.flat_params(), other_space.flat_params(), rtol=1e-6, atol=1e-6)


def test_step_is_inferred_where_a_checkpoint_has_only_num_steps() -> None:
    groups = [group_of(optim.AdamW, lr=1e-2)]
    tier = make_tier(Space(), optim.AdamW, groups, ratio=0.5)
    tier.write_scalars(2, {"num_steps": 7})
    assert tier.read_scalars(2) == {"num_steps": 7, "step": 7.0}


def test_names_are_known_before_the_first_step_and_read_zero() -> None:
    space = Space()
    groups = [group_of(optim.RMSprop, momentum=0.9)]
    tier = make_tier(space, optim.RMSprop, groups, ratio=0.5)
    assert tuple(tier.state_names()) == ("master_weight", "square_avg", "momentum_buffer")
    assert not tier.read_state("square_avg", 0, space.numel).any()
    assert torch.equal(tier.read_state("master_weight", 0, space.numel), space.initial)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_unknown_states_are_key_errors(ratio: float) -> None:
    tier = make_tier(Space(), optim.SGD, [group_of(optim.SGD, lr=0.1)], ratio=ratio)
    with pytest.raises(KeyError, match="exp_avg"):
        tier.read_state("exp_avg", 0, 10)
    with pytest.raises(KeyError, match="exp_avg"):
        tier.write_state("exp_avg", 0, torch.zeros(10))
    with pytest.raises(KeyError, match="exp_avg"):
        tier.check_states(["exp_avg"], [tier.read_scalars(i) for i in range(len(Space().pieces))])


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
    own = [tier.read_scalars(i) for i in range(len(Space().pieces))]
    tier.check_states(tier.state_names(), own)
    with pytest.raises(ValueError, match=match):
        tier.check_states(tier.state_names(), [*own[:-1], scalars])
    with pytest.raises(ValueError, match=match):
        tier.write_scalars(len(own) - 1, scalars)
    assert [tier.read_scalars(i) for i in range(len(own))] == own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ratio", RATIOS)
def test_a_written_master_reaches_the_parameters_rounded(ratio: float, dtype: torch.dtype) -> None:
    space = Space(dtype=dtype)
    tier = make_tier(space, optim.SGD, [group_of(optim.SGD, lr=0.1)], ratio=ratio)
    before = space.flat_params()
    values = torch.linspace(-3, 3, 201)
    tier.write_state("master_weight", 99, values)
    assert torch.equal(tier.read_state("master_weight", 99, 300), values)
    assert torch.equal(space.flat_params()[99:300], values.to(dtype))
    assert torch.equal(space.flat_params()[:99], before[:99])
    assert torch.equal(space.flat_params()[300:], before[300:])


def test_reads_are_copies() -> None:
    space = Space()
    tier = make_tier(space, optim.SGD, [group_of(optim.SGD, lr=0.1)], ratio=0.5)
    tier.read_state("master_weight", 0, space.numel).zero_()
    assert torch.equal(tier.read_state("master_weight", 0, space.numel), space.initial)
