"""A leaf module is one unit with all that is in it, as experts of which each rank uses others."""

import logging

import pytest
from torch import nn

from zero_core.layout.discovery import discover, note_reader
from zero_core.testing import Case


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


def _units(model, leaf_module=None):
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
    assert _units(_net()) == WHOLE
    model = _net()
    model.mixture.parts = model.mixture.experts
    del model.mixture.experts
    assert _units(model) == ["", *(f"mixture.parts.{n}" for n in range(4)), "blocks.0", "blocks.1"]
    model = nn.Module()
    model.action_expert_layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
    assert _units(model) == ["", "action_expert_layers.0", "action_expert_layers.1"]


def test_a_marked_module_is_one_unit():
    assert _units(_marked("mixture")) == WHOLE
    assert _units(_marked("mixture", "below")) == ["", "below", *WHOLE[1:]]
    assert _units(_marked("")) == [""]
    assert _units(_marked("mixture.experts")) == ["", "mixture.experts", "blocks.0", "blocks.1"]


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
    assert _units(_net(), leaf_module) == WHOLE


def test_names_that_the_model_lacks_are_told(caplog):
    with caplog.at_level(logging.WARNING, "zero_core"):
        _units(_net(), {"classes": ["Elsewhere"], "names": ["mixture"], "name_suffixes": ["x.y"]})
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
