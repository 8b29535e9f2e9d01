"""The device tier against torch's optimizers on whole parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zero_core.optim.device_tier import DeviceTier

OPTIMIZERS = [
    (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 1e-2}),
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3}),
    (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    (torch.optim.RMSprop, {"lr": 1e-2, "centered": True, "momentum": 0.1}),
    (torch.optim.NAdam, {"lr": 1e-2}),
    (torch.optim.Adadelta, {"lr": 1e-1}),
]
IDS = [f"{c.__name__}-{i}" for i, (c, _) in enumerate(OPTIMIZERS)]
SIZES = (13, 1, 40)


def _grads(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(n, generator=generator) for n in SIZES]


def _make(optimizer_class, options, dtype=torch.float32):
    """A tier whose shards hold three parameters, the middle one cut off by a gap."""
    torch.manual_seed(0)
    values = [torch.randn(n) for n in SIZES]
    shards = [torch.zeros(16, dtype=dtype), torch.zeros(48, dtype=dtype)]
    group = dict(optimizer_class([nn.Parameter(values[0])], **options).defaults.items())
    tier = DeviceTier(
        numel=64,
        pieces=[(0, 13, 0), (16, 17, 0), (20, 60, 0)],
        params=[(0, shards[0]), (16, shards[1])],
        device=torch.device("cpu"),
        optimizer_class=optimizer_class,
        groups=[group],
    )
    for start, value in zip((0, 16, 20), values, strict=True):
        tier.write_state("master_weight", start, value)
    return tier, group, values, shards


def _step(tier, group, step: int, active, scale: float = 1.0) -> None:
    a, b, c = _grads(step)
    first, second = torch.zeros(16), torch.zeros(48)
    first[:13], second[0:1], second[4:44] = a, b, c
    tier.offer_grad(16, second / scale)
    tier.offer_grad(0, first / scale)
    tier.step([group], active, grad_scale=scale)


def _read(tier) -> list[Tensor]:
    return [tier.read_state("master_weight", s, t) for s, t in ((0, 13), (16, 17), (20, 60))]


@pytest.mark.parametrize(("optimizer_class", "options"), OPTIMIZERS, ids=IDS)
def test_slices_follow_torch_bit_by_bit_and_inactive_pieces_rest(optimizer_class, options):
    tier, group, values, _ = _make(optimizer_class, options)
    params = [nn.Parameter(v.clone()) for v in values]
    plain = optimizer_class(params, **options)
    for step in range(5):
        active = [0, 1, 2] if step % 2 else [0, 2]
        _step(tier, group, step, active)
        for index, grad in enumerate(_grads(step)):
            params[index].grad = grad if index in active else None
        plain.step()
    for mine, theirs in zip(_read(tier), params, strict=True):
        assert torch.equal(mine, theirs.detach())
    assert [tier.read_scalars(i)["num_steps"] for i in range(3)] == [5, 2, 5]


@pytest.mark.parametrize(("optimizer_class", "options"), OPTIMIZERS, ids=IDS)
def test_state_moved_to_another_tier_goes_on_alike(optimizer_class, options):
    first, group, _, _ = _make(optimizer_class, options)
    for step in range(3):
        _step(first, group, step, [0, 2])
    second, _, _, _ = _make(optimizer_class, options)
    _step(second, group, 9, [1])  # has state of its own, to be replaced
    for name in first.state_names():
        second.write_state(name, 0, first.read_state(name, 0, 64))
    for piece in range(3):
        second.write_scalars(piece, first.read_scalars(piece))
    for tier in (first, second):
        for step in (3, 4):
            _step(tier, group, step, [0, 1, 2])
    for a, b in zip(_read(first), _read(second), strict=True):
        assert torch.equal(a, b)


def test_low_precision_shards_hold_the_rounded_master_weights():
    tier, group, _, shards = _make(torch.optim.AdamW, {"lr": 1e-2}, torch.bfloat16)
    _step(tier, group, 0, [0, 1, 2])
    master = tier.read_state("master_weight", 0, 64)
    assert torch.equal(torch.cat(shards), master.bfloat16())
    assert not torch.equal(master, master.bfloat16().float())


def test_gradients_are_multiplied_by_the_scale():
    tiers = [_make(torch.optim.AdamW, {"lr": 1e-2}) for _ in range(2)]
    _step(tiers[0][0], tiers[0][1], 0, [0, 1, 2])
    _step(tiers[1][0], tiers[1][1], 0, [0, 1, 2], scale=0.25)
    for a, b in zip(_read(tiers[0][0]), _read(tiers[1][0]), strict=True):
        assert torch.equal(a, b)


def test_hyperparameters_of_each_step_are_used():
    tier, group, values, _ = _make(torch.optim.SGD, {"lr": 1.0})
    _step(tier, {**group, "lr": 0.0}, 0, [0, 1, 2])
    assert torch.equal(_read(tier)[0], values[0])
    _step(tier, {**group, "lr": 0.5}, 1, [0, 1, 2])
    assert torch.equal(_read(tier)[0], values[0] - 0.5 * _grads(1)[0])


def test_discarded_gradients_are_not_used():
    tier, group, values, _ = _make(torch.optim.SGD, {"lr": 1.0})
    tier.offer_grad(0, torch.full((16,), 9.0))
    tier.discard_grads()
    tier.step([group], [], grad_scale=1.0)
    assert torch.equal(_read(tier)[0], values[0])
