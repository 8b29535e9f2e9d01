"""Units that build() finds, and models and arguments that build() refuses."""

import io
import logging
import re
import sys
import time
from functools import partial

import pytest
import torch
from support.mixture import NUM_EXPERTS, Mixture
from support.tiers import MadeTier
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ExponentialLR, StepLR

import zero_core
from zero_core import ConfigError
from zero_core.layout.discovery import discover
from zero_core.protocols import StateTier
from zero_core.testing import Case, batch, make_model, train

BASE = {"train_micro_batch_size_per_gpu": 2}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}


def _units(model):
    found = discover(model)
    return {name: {found.names[p] for p in members} for name, _, members in found.units}


def test_units_are_the_children_of_lists_and_a_root_for_the_rest_and_what_is_tied():
    units = _units(make_model())
    assert list(units) == ["", "blocks.0", "blocks.1", "blocks.2", "frozen.0"]
    assert units[""] == {("embed.weight", "head.weight"), *(("gain",), ("sometimes",), ("never",))}
    assert all(name.startswith("blocks.1.") for (name,) in units["blocks.1"])
    holder = nn.Module()
    holder.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    holder.blocks[2].weight = holder.blocks[0].weight
    assert _units(holder)[""] == {("blocks.0.weight", "blocks.2.weight")}


def test_lists_of_lists_and_lists_without_forward_are_searched_and_a_sequential_is_cut():
    holder = nn.Module()
    holder.outer = nn.ModuleList(
        [nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})]
    )
    assert [*_units(holder)] == ["", "outer.0.0"]
    assert [*_units(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)))] == ["", "0", "2"]


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


class _LateTier(MadeTier):
    """A tier whose update completes only when a caller waits for it."""

    update = None

    def _publish(self, copies):
        self.update = partial(super()._publish, copies)

    def are_params_ready(self, start, stop):
        return self.update is None

    def wait_params(self, start, stop):
        update, self.update = self.update, None
        if update is not None:
            update()


@pytest.mark.parametrize("stage", [0, 3])
def test_values_wait_for_a_state_tier_that_updates_late(stage):
    losses = [
        train(Case(stage, "bf16").build(state_tier=tier), [batch(step, 0, 0) for step in range(3)])
        for tier in (None, _LateTier.made)
    ]
    assert losses[1] == losses[0]


class _LackingTier:
    def __init__(self, tier):
        for name in vars(StateTier):
            if not name.startswith("_") and name != "owns_grads":
                setattr(self, name, getattr(tier, name))


def test_a_state_tier_that_lacks_members_is_refused_with_their_names():
    def former(*, names, config, adam_kernel, device_tier, **further):
        return _LackingTier(device_tier(**further))

    config = {**BASE, **ADAMW}
    with pytest.raises(
        ConfigError, match=r"_LackingTier lacks members of .*StateTier: owns_grads$"
    ):
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


def _grouped(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = (
        [p for p in trained if (p.ndim > 1) is is_matrix] for is_matrix in (True, False)
    )
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "lr": 1e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)


def _chained(optimizer):
    return ChainedScheduler([StepLR(optimizer, 1, 0.5), ExponentialLR(optimizer, 0.9)])


@pytest.mark.parametrize(
    ("is_made", "scheduler"), [(True, partial(StepLR, step_size=1, gamma=0.5)), (False, _chained)]
)
def test_a_given_optimizer_is_driven_with_its_groups_and_schedulers(is_made, scheduler, caplog):
    model, twin = make_model(), make_model()
    optimizer, plain = _grouped(model), _grouped(twin)
    plain_scheduler = scheduler(plain)

    given = scheduler if is_made else scheduler(optimizer)
    engine = zero_core.build(model, BASE, optimizer=optimizer, lr_scheduler=given)
    for step in range(4):
        train(engine, [batch(step, 0, 0)])
        plain.zero_grad()
        twin(**batch(step, 0, 0))["loss"].backward()
        plain.step()
        plain_scheduler.step()
    full = engine.full_state_dict()
    assert all(torch.equal(full[k], v) for k, v in twin.state_dict().items())
    assert [g["lr"] for g in engine.optimizer.param_groups] == [g["lr"] for g in plain.param_groups]
    assert not caplog.records
    for step in range(2):
        engine.lr_scheduler.step()
        train(engine, [batch(step, 0, 0)])
    assert caplog.text.count("so it advances twice: leave one out") == 1


def test_a_factory_of_schedules_gets_the_configured_optimizer_and_wins_over_the_configured_one():
    made = []
    engine = zero_core.build(
        nn.Linear(3, 2),
        BASE | ADAMW | {"scheduler": {"type": "WarmupLR", "params": {}}},
        lr_scheduler=lambda optimizer: made.append(optimizer) or StepLR(optimizer, 1),
    )
    assert made == [engine.optimizer.given]
    assert type(engine.lr_scheduler) is StepLR


_STRANGER = StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), 1)


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ("WarmupLR", "lacks step, state_dict"),
        (lambda optimizer: None, "lacks step, state_dict"),
        (_STRANGER, "StepLR .*, which steps another optimizer"),
    ],
)
def test_what_is_no_schedule_is_refused_at_build(wrong, cause):
    with pytest.raises(ConfigError, match=f"lr_scheduler is .*{cause}"):
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


def test_a_build_that_cannot_train_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="no optimizer"):
        zero_core.build(nn.Linear(3, 2), BASE)
    other = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=1)
    with pytest.raises(ConfigError, match="not in the model"):
        zero_core.build(nn.Linear(3, 2), BASE, optimizer=other)
    with pytest.raises(ConfigError, match=r"expected an optimizer over model\.parameters\(\)"):
        zero_core.build(nn.Linear(3, 2), BASE, optimizer=torch.optim.SGD)
    with pytest.raises(ConfigError, match=r"a DataParallel, .* give the module inside it"):
        zero_core.build(nn.DataParallel(nn.Linear(3, 2)), BASE | ADAMW)
    model = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match="bias requires a gradient but is in no optimizer group"):
        zero_core.build(model, BASE, optimizer=torch.optim.SGD([model.weight], lr=1))
    used = torch.optim.SGD(model.parameters(), lr=1, momentum=0.5)
    model(torch.ones(1, 3)).sum().backward()
    used.step()
    with pytest.raises(ConfigError, match="already stepped"):
        zero_core.build(model, BASE, optimizer=used)
    with pytest.raises(ConfigError, match="no parameter that requires a gradient"):
        zero_core.build(nn.Linear(3, 2).requires_grad_(False), {**BASE, **ADAMW})
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="init_process_group"):
        zero_core.build(nn.Linear(3, 2), {**BASE, **ADAMW})


@pytest.mark.parametrize(
    ("is_terminal", "rank", "takes_s", "shown"),
    [
        (True, "0", 1.8, "\x1b\\[Kzero_core.build: 1 s.*\r\x1b\\[K"),
        *((True, "0", 0.0, ""), (True, "1", 1.5, ""), (False, "0", 1.5, "")),
    ],
)
def test_long_build_is_shown_on_a_terminal_by_rank_0(
    monkeypatch, is_terminal, rank, takes_s, shown
):
    stream, module = io.StringIO(), sys.modules["zero_core.building"]
    adopt_buffers = module.adopt_buffers
    monkeypatch.setattr(
        module, "adopt_buffers", lambda *given: time.sleep(takes_s) or adopt_buffers(*given)
    )
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("RANK", rank)
    zero_core.build(nn.Linear(2, 2), BASE | ADAMW).close()
    assert re.fullmatch(shown, stream.getvalue(), re.DOTALL)


def _net():
    model = nn.Module()
    model.below, model.mixture = nn.Linear(5, 5), Mixture()
    model.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
    return model


def _built_units(model, leaf_module=None):
    zero = {} if leaf_module is None else {"leaf_module": leaf_module}
    engine = Case(zero=zero).build(model=model)
    return [unit.name for unit in engine.layout.units]


def _marked(*paths):
    model = _net()
    for path in paths:
        model.get_submodule(path)._is_zero_leaf = True
    return model


BLOCKS = ["blocks.0", "blocks.1"]
WHOLE = ["", "mixture", *BLOCKS]


def test_without_a_mark_experts_are_a_unit_and_other_parts_are_units():
    assert _built_units(_net()) == WHOLE
    model = _net()
    model.mixture.parts = model.mixture.experts
    del model.mixture.experts
    assert _built_units(model) == ["", *(f"mixture.parts.{n}" for n in range(NUM_EXPERTS)), *BLOCKS]
    model = nn.Module()
    model.action_expert_layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
    assert _built_units(model) == ["", "action_expert_layers.0", "action_expert_layers.1"]


def test_a_module_that_is_marked_or_named_by_the_configuration_is_one_unit():
    assert _built_units(_marked("mixture")) == WHOLE
    assert _built_units(_marked("mixture", "below")) == ["", "below", *WHOLE[1:]]
    assert _built_units(_marked("")) == [""]
    assert _built_units(_marked("mixture.experts")) == ["", "mixture.experts", *BLOCKS]
    for key, names in (
        *(("classes", ["Mixture"]), ("classes", f"{Mixture.__module__}.Mixture")),
        *(("names", ["mixture"]), ("name_suffixes", ["ixture"])),
    ):
        assert _built_units(_net(), {key: names}) == WHOLE


def test_names_that_the_model_lacks_are_told(caplog):
    with caplog.at_level(logging.WARNING, "zero_core"):
        _built_units(
            _net(), {"classes": ["Elsewhere"], "names": ["mixture"], "name_suffixes": ["x.y"]}
        )
    assert "what the model lacks: ['Elsewhere', 'x.y']" in caplog.text
