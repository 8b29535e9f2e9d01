"""Update rules: optimizers and settings that kernels compute, or refuse, or leave to torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernels import Lion, NamedLion, ReferenceAdam, ReferenceKernel
from support.tiers import Space, assert_same, group_of, make_tier, offer, snapshot, train, trained
from torch import optim

from zero_offload import OffloadedOptimizer
from zero_offload.rules.resolve import resolve_rule


class Unknown(optim.AdamW):
    """Optimizer that names an update rule that does not exist."""

    update_rule = "shampoo"


def test_state_dict_of_a_piece_never_updated_holds_its_master_alone() -> None:
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    kernel = ReferenceKernel()
    optimizer = OffloadedOptimizer(optim.SGD, params, lr=0.1, momentum=0.9, adam_kernel=kernel)
    params[0].grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert set(state[0]) == {"master_weight", "momentum_buffer", "num_steps"}
    assert set(state[1]) == {"master_weight", "num_steps"}


def test_adagrads_sum_starts_at_its_initial_value_and_returns_to_it(kernel: Any) -> None:
    groups = [group_of(optim.Adagrad, initial_accumulator_value=0.25)]
    for route in (kernel, None):
        space = Space()
        tier = make_tier(space, optim.Adagrad, groups, ratio=0.5, kernel=route)
        train(tier, space, groups, range(1), active=[0, 2])
        tier.write_scalars(0, {"num_steps": 0})
        found = tier.read_state("sum", 0, space.numel)
        assert torch.equal(found[:42], torch.full((42,), 0.25))
        assert (found[42:253] > 0.25).all()


@pytest.mark.parametrize(
    ("kernel", "cls", "groups"),
    [
        (ReferenceAdam(), optim.SGD, [{"momentum": 0.9}]),
        (None, optim.AdamW, [{}]),
        (ReferenceKernel(), Lion, [{}]),  # Lion names no rule
        (ReferenceKernel(), Unknown, [{}]),
        (ReferenceKernel(), optim.Adam, [{"amsgrad": True}]),
        (ReferenceKernel(), optim.SGD, [{"dampening": 0.5}, {"momentum": 0.9, "dampening": 0.5}]),
    ],
)
def test_what_no_kernel_computes_is_left_to_torch(
    kernel: Any, cls: Any, groups: list[dict[str, Any]]
) -> None:
    filled = [group_of(cls, **settings) for settings in groups]
    assert resolve_rule(kernel, cls, filled) is None
    if cls.__module__.startswith("torch."):  # create_tier refuses Unknown, and a kernel for Lion
        assert_same(trained(cls, filled, kernel=kernel), trained(cls, filled))


@pytest.mark.parametrize(
    ("cls", "change", "match"),
    [
        (optim.SGD, {"momentum": 0.9}, "momentum was 0"),
        (optim.SGD, {"lr": -0.1}, "lr = -0.1"),
        (optim.Adagrad, {"lr": float("nan")}, "lr = nan"),
        (optim.Adam, {"amsgrad": True}, "amsgrad"),
        (NamedLion, {"weight_decay": -1.0}, "weight_decay"),
        (NamedLion, {"betas": (0.9, 1.0)}, "betas"),
        (optim.AdamW, {"betas": (0.9, 1.5), "lr": 1.0}, "betas"),
        (optim.AdamW, {"lr": 1e39}, "lr"),
        (optim.SGD, {"dampening": float("nan")}, "dampening"),
    ],
)
def test_settings_changed_to_what_a_kernel_cannot_do_are_refused_before_anything_is_updated(
    cls: Any, change: dict[str, Any], match: str
) -> None:
    space, groups = Space(), [group_of(cls)]
    tier = make_tier(space, cls, groups, kernel=ReferenceKernel())
    before = snapshot(tier, space)
    offer(tier, space, 0)
    with pytest.raises(ValueError, match=match):
        tier.step([{**groups[0], **change}], range(5), grad_scale=1.0)
    assert_same(snapshot(tier, space), before)
