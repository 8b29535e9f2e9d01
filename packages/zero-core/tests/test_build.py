"""What build() finds in a model, takes over from an optimizer, and refuses."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import zero_core
from zero_core import ConfigError, MissingPartError
from zero_core.layout.discovery import discover
from zero_core.protocols import StateTier
from zero_core.testing import batch, make_model

BASE = {"train_micro_batch_size_per_gpu": 2}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}


def test_units_are_the_children_of_lists_and_a_root_for_the_rest():
    found = discover(make_model())
    units = {name: {found.names[p][0] for p in members} for name, _, members in found.units}
    assert list(units) == ["", "blocks.0", "blocks.1", "blocks.2", "frozen.0"]
    assert units[""] == {"embed.weight", "gain", "sometimes", "never"}
    assert all(name.startswith("blocks.1.") for name in units["blocks.1"])
    assert ("embed.weight", "head.weight") in found.names


def test_weights_tied_across_blocks_belong_to_the_root():
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)])
    model[2].weight = model[0].weight
    holder = nn.Module()
    holder.blocks = model
    found = discover(holder)
    root = found.units[0][2]
    assert [found.names[p] for p in root] == [("blocks.0.weight", "blocks.2.weight")]


def test_lists_of_lists_and_lists_without_forward_are_searched_through():
    holder = nn.Module()
    holder.outer = nn.ModuleList(
        [nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})]
    )
    names = [name for name, _, _ in discover(holder).units]
    assert names == ["", "outer.0.0"]


def test_a_sequential_model_is_cut_into_its_layers():
    names = [
        n for n, _, _ in discover(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))).units
    ]
    assert names == ["", "0", "2"]


@pytest.mark.parametrize(
    ("block", "match"),
    [
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            "zero-offload",
        ),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero-comm"),
    ],
)
def test_a_part_that_is_not_installed_is_named_with_its_cure(monkeypatch, block, match):
    monkeypatch.setattr("zero_core.plugins.entry_points", lambda **kwargs: ())
    with pytest.raises(MissingPartError, match=f"zero_optimization.*pip install {match}"):
        zero_core.build(make_model(), {**BASE, **ADAMW, **block})


@pytest.mark.parametrize("stage", [0, 3])
def test_a_state_tier_is_told_the_name_of_each_piece(stage):
    told = {}

    def factory(*, names, pieces, params, config, adam_kernel, device_tier, **further):
        told.update(names=names, pieces=pieces)
        return device_tier(pieces=pieces, params=params, **further)

    config = {**BASE, **ADAMW, "zero_optimization": {"stage": stage}}
    engine = zero_core.build(make_model(), config, state_tier=factory)
    sizes = {n: p.shape.numel() for n, p in make_model().named_parameters() if p.requires_grad}
    assert {n: b - a for n, (a, b, _) in zip(told["names"], told["pieces"], strict=True)} == sizes
    engine.close()


class _FormerTier:
    """A tier of the protocol of before, with every member but ``owns_grads``."""

    keeps_grads = True

    def __init__(self, tier: StateTier) -> None:
        for name in vars(StateTier):
            if not name.startswith("_") and name != "owns_grads":
                setattr(self, name, getattr(tier, name))


def test_a_state_tier_that_lacks_members_is_refused_with_their_names():
    def former(*, names, config, adam_kernel, device_tier, **further):
        return _FormerTier(device_tier(**further))

    config = {**BASE, **ADAMW}
    named = "_FormerTier lacks members of .*StateTier: owns_grads .`keeps_grads` is `owns_grads` no"
    with pytest.raises(ConfigError, match=named):
        zero_core.build(make_model(), config, state_tier=former)
    with pytest.raises(ConfigError, match=r"lacks .*: owns_grads, offer_grad, .*check_states$"):
        zero_core.build(make_model(), config, state_tier=lambda **_: object())


def test_a_pattern_without_a_trainable_parameter_is_refused_with_names_near_it():
    for pattern, near in (("blocks.*.upp.weight", "blocks.0.up.weight"), ("frozen.*", "")):
        offload = {"device": "cpu", "parameters": ["embed.*", pattern]}
        config = {**BASE, **ADAMW, "zero_optimization": {"offload_optimizer": offload}}
        with pytest.raises(ConfigError) as error:
            zero_core.build(make_model(), config, state_tier=lambda **_: None)
        assert f"{pattern!r} matches no trainable parameter; near it are [" in str(error.value)
        assert near in str(error.value)


@pytest.mark.parametrize("is_made", [False, True])
def test_a_given_optimizer_is_driven_with_its_groups_and_schedulers(is_made):
    model = make_model()
    decay = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    rest = [p for p in model.parameters() if p.requires_grad and p.ndim == 1]
    groups = [{"params": decay, "weight_decay": 0.3}, {"params": rest, "lr": 1e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)
    scheduler = partial(StepLR, step_size=1, gamma=0.5)

    twin = make_model()
    twin_decay = [p for p in twin.parameters() if p.requires_grad and p.ndim > 1]
    twin_rest = [p for p in twin.parameters() if p.requires_grad and p.ndim == 1]
    plain = torch.optim.AdamW(
        [{"params": twin_decay, "weight_decay": 0.3}, {"params": twin_rest, "lr": 1e-3}],
        lr=1e-2,
        weight_decay=0.0,
    )
    plain_scheduler = scheduler(plain)

    given = scheduler if is_made else scheduler(optimizer)
    engine = zero_core.build(model, BASE, optimizer=optimizer, lr_scheduler=given)
    for step in range(4):
        engine.backward(engine(**batch(step, 0, 0))["loss"])
        engine.step()
        plain.zero_grad()
        twin(**batch(step, 0, 0))["loss"].backward()
        plain.step()
        plain_scheduler.step()
    full = engine.full_state_dict()
    assert all(torch.equal(full[k], v) for k, v in twin.state_dict().items())
    assert [g["lr"] for g in engine.optimizer.param_groups] == [g["lr"] for g in plain.param_groups]


def test_a_factory_of_schedules_gets_the_configured_optimizer_and_wins_over_the_configured_one():
    made = []
    engine = zero_core.build(
        nn.Linear(3, 2),
        BASE | ADAMW | {"scheduler": {"type": "WarmupLR", "params": {}}},
        lr_scheduler=lambda optimizer: made.append(optimizer) or StepLR(optimizer, 1),
    )
    assert made == [engine.optimizer.given]
    assert type(engine.lr_scheduler) is StepLR


@pytest.mark.parametrize("wrong", ["WarmupLR", lambda optimizer: None])
def test_what_is_no_schedule_is_refused_at_build(wrong):
    with pytest.raises(ConfigError, match=r"lr_scheduler is or makes .* lacks step, state_dict"):
        zero_core.build(nn.Linear(3, 2), BASE | ADAMW, lr_scheduler=wrong)


def test_stepping_the_optimizer_by_hand_is_refused():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = zero_core.build(model, BASE, optimizer=optimizer)
    with pytest.raises(RuntimeError, match=r"call engine.step\(\) instead of SGD.step"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"call engine.step\(\)"):
        engine.optimizer.step()
    with pytest.raises(RuntimeError, match="save_checkpoint"):
        engine.optimizer.state_dict()


def test_step_hooks_of_the_engines_optimizer_run():
    engine = zero_core.build(nn.Linear(3, 2), {**BASE, **ADAMW})
    seen = []
    engine.optimizer.register_step_post_hook(lambda *args: seen.append("after"))
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    assert seen == ["after"]


def test_zero_grad_forgets_what_was_accumulated():
    results = []
    for forgets in (False, True):
        torch.manual_seed(0)
        engine = zero_core.build(
            nn.Linear(3, 2), {**BASE, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
        )
        if forgets:
            engine.backward(engine(torch.full((1, 3), 100.0)).sum())
            engine.optimizer.zero_grad()
        engine.backward(engine(torch.ones(1, 3)).sum())
        engine.step()
        results.append(engine.full_state_dict()["weight"])
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({}, "no optimizer"),
        ({"optimizer": {"type": "AdamX"}}, "optimizer.type = 'AdamX' is not served"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lrate": 1}}},
            "optimizer.params.lrate: unknown",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": -1}}},
            "params.lr: Input should",
        ),
        ({**ADAMW, "scheduler": {"type": "Nope"}}, "scheduler.type = 'Nope'"),
        ({**ADAMW, "scheduler": {"type": "WarmupDecayLR"}}, "total_num_steps"),
        ({**ADAMW, "scheduler": {"type": "WarmupLR", "params": {"warm": 1}}}, "warm: unknown key"),
    ],
)
def test_an_optimizer_or_scheduler_that_does_not_fit_is_refused(config, match):
    with pytest.raises(ConfigError, match=match):
        zero_core.build(nn.Linear(3, 2), {**BASE, **config})


def test_optimizers_that_do_not_belong_to_the_model_are_refused():
    with pytest.raises(ConfigError, match="not in the model"):
        zero_core.build(
            nn.Linear(3, 2), BASE, optimizer=torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=1)
        )
    model = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match="bias requires a gradient but is in no optimizer group"):
        zero_core.build(model, BASE, optimizer=torch.optim.SGD([model.weight], lr=1))
    used = torch.optim.SGD(model.parameters(), lr=1, momentum=0.5)
    model(torch.ones(1, 3)).sum().backward()
    used.step()
    with pytest.raises(ConfigError, match="already stepped"):
        zero_core.build(model, BASE, optimizer=used)


def test_a_frozen_model_and_a_meta_model_are_refused():
    frozen = nn.Linear(3, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter that requires a gradient"):
        zero_core.build(frozen, {**BASE, **ADAMW})
    with pytest.raises(ConfigError, match="meta device"):
        zero_core.build(nn.Linear(3, 2, device="meta"), {**BASE, **ADAMW})


def test_ranks_without_a_process_group_are_told_what_to_do(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="init_process_group"):
        zero_core.build(nn.Linear(3, 2), {**BASE, **ADAMW})


def test_mixed_dtypes_keep_their_own():
    engine = zero_core.build(
        nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2).double()}), {**BASE, **ADAMW}
    )
    dtypes = {p.dtype for p in engine.module.parameters()}
    assert dtypes == {torch.float32, torch.float64}
    engine.backward(
        engine.module["a"](torch.ones(1, 2)).sum()
        + engine.module["b"](torch.ones(1, 2).double()).sum()
    )
    engine.step()
    assert engine.full_state_dict()["b.weight"].dtype == torch.float64


def test_the_memory_report_is_the_formula_of_a_single_rank():
    engine = zero_core.build(
        nn.Linear(32, 32, bias=False), {**BASE, **ADAMW, "bf16": {"enabled": True}}
    )
    assert engine.memory_report()["parameters"] == 2 * 1024
    assert engine.memory_report()["gradient shards"] == 4 * 1024


def test_schedules_warm_up_and_go_down():
    engine = zero_core.build(
        nn.Linear(3, 2),
        {
            **BASE,
            **ADAMW,
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {
                    "total_num_steps": 6,
                    "warmup_num_steps": 2,
                    "warmup_max_lr": 0.5,
                    "warmup_type": "linear",
                },
            },
        },
    )
    rates = []
    for _ in range(8):
        rates.append(engine.optimizer.param_groups[0]["lr"])
        engine.backward(engine(torch.ones(1, 3)).sum())
        engine.step()
    # The count starts at -1: rate of iteration -1 (the lowest), 0, 1, then down to 0 at 6.
    assert rates == [0.0, 0.0, 0.25, 0.5, 0.375, 0.25, 0.125, 0.0]
