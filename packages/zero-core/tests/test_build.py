"""Units that build() finds, what it adopts and what it refuses."""

import io
import logging
import sys
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import zero_core
from zero_core import ConfigError
from zero_core.layout.discovery import discover, note_reader
from zero_core.protocols import StateTier
from zero_core.testing import Case, batch, make_model, train

BASE = {"train_micro_batch_size_per_gpu": 2}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}


def _units(model):
    found = discover(model)
    return {name: {found.names[p] for p in members} for name, _, members in found.units}


def test_units_are_the_children_of_lists_and_a_root_for_the_rest():
    units = _units(make_model())
    assert list(units) == ["", "blocks.0", "blocks.1", "blocks.2", "frozen.0"]
    assert units[""] == {("embed.weight", "head.weight"), *(("gain",), ("sometimes",), ("never",))}
    assert all(name.startswith("blocks.1.") for (name,) in units["blocks.1"])


def test_weights_tied_across_blocks_belong_to_the_root():
    holder = nn.Module()
    holder.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)])
    holder.blocks[2].weight = holder.blocks[0].weight
    assert _units(holder)[""] == {("blocks.0.weight", "blocks.2.weight")}


def test_lists_of_lists_and_lists_without_forward_are_searched_and_a_sequential_is_cut():
    inner = [nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})]
    holder = nn.Module()
    holder.outer = nn.ModuleList(inner)
    assert list(_units(holder)) == ["", "outer.0.0"]
    assert list(_units(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)))) == [
        "",
        "0",
        "2",
    ]


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


class _LackingTier:
    """A tier that lacks ``owns_grads``."""

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


@pytest.mark.parametrize("is_made", [False, True])
def test_a_given_optimizer_is_driven_with_its_groups_and_schedulers(is_made):
    model, twin = make_model(), make_model()
    optimizer, plain = _grouped(model), _grouped(twin)
    scheduler = partial(StepLR, step_size=1, gamma=0.5)
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


def test_optimizers_that_are_missing_or_do_not_belong_to_the_model_are_refused():
    with pytest.raises(ConfigError, match="no optimizer"):
        zero_core.build(nn.Linear(3, 2), BASE)
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


def test_a_frozen_model_is_refused():
    frozen = nn.Linear(3, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter that requires a gradient"):
        zero_core.build(frozen, {**BASE, **ADAMW})


def test_ranks_without_a_process_group_are_told_what_to_do(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="init_process_group"):
        zero_core.build(nn.Linear(3, 2), {**BASE, **ADAMW})


CONFIG = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {}}}


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def _shown_by_build(monkeypatch, stream, takes_s):
    """Return what a build that takes so long writes to stderr."""
    module = sys.modules["zero_core.build"]  # the package has the function under that name
    adopt_buffers = module.adopt_buffers

    def slow(*arguments):
        time.sleep(takes_s)
        adopt_buffers(*arguments)

    monkeypatch.setattr(module, "adopt_buffers", slow)
    monkeypatch.setattr(sys, "stderr", stream)
    zero_core.build(nn.Linear(2, 2), CONFIG).close()
    return stream.getvalue()


def test_long_build_is_shown_on_a_terminal(monkeypatch):
    shown = _shown_by_build(monkeypatch, _Terminal(), 1.8)
    assert "zero_core.build: 1 s\r" in shown
    assert shown.endswith("\r\x1b[K"), "the line is removed"


@pytest.mark.parametrize(
    ("stream", "rank", "takes_s"),
    [(_Terminal(), "0", 0.0), (_Terminal(), "1", 1.5), (io.StringIO(), "0", 1.5)],
    ids=["short", "another rank", "no terminal"],
)
def test_nothing_is_shown_otherwise(monkeypatch, stream, rank, takes_s):
    monkeypatch.setenv("RANK", rank)
    assert _shown_by_build(monkeypatch, stream, takes_s) == ""


class _Mixture(nn.Module):
    """Experts, found by the name of their list."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, x):
        return self.experts[0](x)


def _net():
    model = nn.Module()
    model.below, model.mixture = nn.Linear(5, 5), _Mixture()
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


WHOLE = ["", "mixture", "blocks.0", "blocks.1"]


def test_without_a_mark_experts_are_a_unit_and_other_parts_are_units():
    assert _built_units(_net()) == WHOLE
    model = _net()
    model.mixture.parts = model.mixture.experts
    del model.mixture.experts
    assert _built_units(model) == [
        "",
        *(f"mixture.parts.{n}" for n in range(4)),
        "blocks.0",
        "blocks.1",
    ]
    model = nn.Module()
    model.action_expert_layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
    assert _built_units(model) == ["", "action_expert_layers.0", "action_expert_layers.1"]


def test_a_marked_module_is_one_unit():
    assert _built_units(_marked("mixture")) == WHOLE
    assert _built_units(_marked("mixture", "below")) == ["", "below", *WHOLE[1:]]
    assert _built_units(_marked("")) == [""]
    assert _built_units(_marked("mixture.experts")) == [
        "",
        "mixture.experts",
        "blocks.0",
        "blocks.1",
    ]


@pytest.mark.parametrize(
    "leaf_module",
    [
        {"classes": ["_Mixture"]},
        {"classes": f"{__name__}._Mixture"},
        {"names": ["mixture"]},
        {"name_suffixes": ["ixture"]},
    ],
)
def test_the_configuration_names_leaves(leaf_module):
    assert _built_units(_net(), leaf_module) == WHOLE


def test_names_that_the_model_lacks_are_told(caplog):
    with caplog.at_level(logging.WARNING, "zero_core"):
        _built_units(
            _net(), {"classes": ["Elsewhere"], "names": ["mixture"], "name_suffixes": ["x.y"]}
        )
    assert "what the model lacks: ['Elsewhere', 'x.y']" in caplog.text


def test_a_parameter_that_another_block_reads_is_gathered_with_the_root():
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(5, 5) for _ in range(2))})
    weight, reader = model["blocks"][0].weight, model["blocks"][1]

    def unit_of_weight():
        found = discover(model)
        number = next(n for n, p in enumerate(found.params) if p is weight)
        return next(name for name, _, members in found.units if number in members)

    assert unit_of_weight() == "blocks.0"
    assert not note_reader(reader, weight)
    assert unit_of_weight() == ""
    assert note_reader(reader, weight, is_reader=False)
    assert unit_of_weight() == "blocks.0"
    note_reader(model["blocks"][0], weight)  # it does so anyway
    assert unit_of_weight() == "blocks.0"
