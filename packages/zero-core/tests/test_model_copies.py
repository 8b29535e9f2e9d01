"""Copies of an engine's model: plain models with the same values, or an error."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import zero_core
from zero_core.testing import Case, adamw, make_tower, on_ranks, rows, seeded, train


def _net():
    with seeded(1):  # so that simulated ranks, which are threads, draw one after another
        model = make_tower(3)
        for block in model.blocks:
            block.insert(0, nn.BatchNorm1d(7))
        model.last = nn.Linear(7, 7, bias=False)
        model.last.weight = model.first.weight
        model.first.bias.requires_grad_(False)
    return model


def _engine(stage, process_group=None):
    return Case(stage).build(process_group, _net())


def _assert_is_plain(model):
    for name, module in model.named_modules():
        hooks = {k: v for k, v in vars(module).items() if k.endswith("_hooks") and v}
        assert not hooks, (name, hooks)
        assert not {"__deepcopy__", "forward"} & vars(module).keys()
    for param in model.parameters():
        assert type(param) is nn.Parameter
        assert not getattr(param, "_post_accumulate_grad_hooks", None)
        assert zero_core.engine_of(param) is None


def _trains_alone(model, state):
    plain = _net()
    plain.load_state_dict(state)
    for each in (model, plain):
        each.train()
        optimizer = adamw(each)
        for step in range(2):
            optimizer.zero_grad()
            each(rows(step, 7)).backward()
            optimizer.step()
    found, expected = model.state_dict(), plain.state_dict()
    assert all(torch.equal(found[k], expected[k]) for k in expected)


@pytest.mark.parametrize(("world_size", "stage"), [(2, 0), (2, 1), (3, 2), (3, 3)])
@on_ranks()
def test_a_copy_within_gathered_is_a_plain_model_that_trains_alone(ranks, stage):
    hooked = {"accumulation_schedule": "vertical", "world_size_invariant": True}
    for more in ({}, {"activation_checkpointing": {"enabled": True}}, hooked):
        config = Case(stage).config() | more
        engine = zero_core.build(_net(), config, process_group=ranks)
        train(engine, [rows(step, ranks.rank) for step in range(2)])
        state = engine.full_state_dict()
        with engine.gathered():
            copied = copy.deepcopy(engine.module)
            part = copy.deepcopy(engine.module.blocks[1])
            within = copy.deepcopy({"model": engine.module, "same": engine.module.blocks})
            average = AveragedModel(engine.module, use_buffers=True)
        assert within["same"] is within["model"].blocks
        for each in (copied, within["model"], average.module):
            _assert_is_plain(each)
            found = each.state_dict()
            assert all(torch.equal(found[k], state[k]) for k in state), stage
            assert each.last.weight is each.first.weight
            assert not each.first.bias.requires_grad
        _assert_is_plain(part)
        assert torch.equal(part[1].weight, state["blocks.1.1.weight"])
        if ranks.rank == ranks.size - 1:
            _trains_alone(copied, state)


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_a_copy_is_refused_where_values_are_not_whole(ranks, stage):
    engine = _engine(stage, process_group=ranks)
    train(engine, [rows(0, ranks.rank)])
    state = engine.full_state_dict()
    if stage == 3:
        with pytest.raises(RuntimeError, match=r"blocks\.1\.\d\.weight .*gathered\(\)"):
            copy.deepcopy(engine.module.blocks[1])
        with engine.gathered(params=engine.module.blocks[1].parameters()):
            found = copy.deepcopy(engine.module.blocks[1]).state_dict()
            with pytest.raises(RuntimeError, match="does not hold its current values"):
                copy.deepcopy(engine.module)
        assert torch.equal(found["1.weight"], state["blocks.1.1.weight"])
    else:
        copied = copy.deepcopy(engine.module)
        _assert_is_plain(copied)
        assert all(torch.equal(copied.state_dict()[k], state[k]) for k in state)
    engine.close()


def test_an_ended_engine_leaves_copying_to_the_model():
    engine = _engine(0)
    model = engine.unwrap()
    _assert_is_plain(model)
    _trains_alone(copy.deepcopy(model), model.state_dict())
