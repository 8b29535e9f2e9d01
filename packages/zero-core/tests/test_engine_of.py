"""A parameter knows the engine that trains it."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import zero_core
from zero_core.testing import Case, batch, make_model, on_ranks


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_the_engine_of_a_parameter_is_found(ranks, stage):
    engine = Case(stage).build(ranks)
    other = Case(stage).build(ranks)
    for built in (engine, other):
        for name, param in built.module.named_parameters():
            assert zero_core.engine_of(param) is built
            assert built.owns(param) == name
    engine.backward(engine(**batch(0, 0, ranks.rank))["loss"])
    engine.step()
    assert zero_core.engine_of(engine.module.embed.weight) is engine
    assert engine.owns(other.module.embed.weight) is None
    assert engine.owns(engine.module.head.weight) == "embed.weight"  # tied: its first name


def test_parameters_of_no_engine_have_none():
    engine = Case().build()
    assert zero_core.engine_of(nn.Parameter(torch.ones(2))) is None
    assert zero_core.engine_of(copy.deepcopy(engine.module.gain)) is None


def test_a_model_has_one_engine_at_a_time():
    model = make_model()
    first = Case().build(model=model)
    text = r"engine_of\(model\.get_parameter\('gain'\)\).*by its unwrap\(\), on every rank"
    with pytest.raises(zero_core.ConfigError, match=text):
        Case().build(model=model)
    first.close()
    assert zero_core.engine_of(model.gain) is None
    second = Case().build(model=model)
    assert zero_core.engine_of(model.gain) is second
    assert first.owns(model.gain) is None


def test_the_search_keeps_no_engine_alive():
    engine = Case().build()
    alive = weakref.ref(engine)
    assert zero_core.engine_of(engine.module.gain) is engine
    engine.close()
    del engine
    gc.collect()
    assert alive() is None
