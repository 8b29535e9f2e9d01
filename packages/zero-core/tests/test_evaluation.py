"""Engines without an optimizer, which evaluate like the plain module."""

import logging

import pytest
import torch
from torch import nn

import zero_core
from zero_core import ConfigError, EvaluationOnlyError
from zero_core.testing import Case, assert_same, batch, make_model, on_ranks, train


def _config(stage, dtype="fp32"):
    config = Case(stage, dtype).config()
    del config["optimizer"]
    return config


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (1, 3), (2, 2), (3, 0), (3, 3)])
@on_ranks()
def test_it_computes_what_the_plain_module_does_and_keeps_values_alone(ranks, stage):
    for dtype in ("fp32", "bf16"):
        plain = make_model()
        if dtype == "bf16":
            plain.to(torch.bfloat16)
        engine = zero_core.build(
            make_model(), _config(stage, dtype), is_training=False, process_group=ranks
        )
        engine.eval()
        for step in range(2):
            with torch.no_grad():
                expected = plain(**batch(step, 0, ranks.rank))["logits"]
            found = engine(**batch(step, 0, ranks.rank))["logits"]
            assert torch.equal(found, expected)
            assert not found.requires_grad
        assert_same(engine.full_state_dict(), dict(plain.state_dict()))
        with engine.gathered(params=[engine.module.gain]):
            assert engine.module.gain.item() == 1.0
        report = engine.memory_report()
        assert not [kind for kind, nbytes in report.items() if "grad" in kind and nbytes]
        numel = sum(p.numel() for p in plain.parameters())
        shares = ranks.size if stage == 3 else 1
        kept = report["parameters"] / (4 if dtype == "fp32" else 2)
        assert numel / shares <= kept < 2 * numel / shares + 1000


def test_what_trains_is_refused():
    model = make_model()
    wanted = [p.requires_grad for p in model.parameters()]
    engine = zero_core.build(model, _config(0), is_training=False)
    assert [p.requires_grad for p in model.parameters()] == wanted
    loss = engine(**batch(0, 0, 0))["loss"]
    with pytest.raises(RuntimeError, match=r"is_training=True"):
        engine.backward(loss)
    assert not hasattr(engine, "step")
    members = set(dir(zero_core.Engine)) - set(dir(zero_core.ShardedModel))
    for name in {"optimizer", *(name for name in members if not name.startswith("_"))}:
        with pytest.raises(EvaluationOnlyError, match=name):
            getattr(engine, name)
    with pytest.raises(RuntimeError, match="requires a gradient now"):
        engine.module(**batch(0, 0, 0))  # bypasses the engine, which disables gradients


def test_a_missing_attribute_of_an_engine_that_trains_is_a_plain_attribute_error():
    engine = Case(0, "fp32").build()
    del engine.optimizer
    with pytest.raises(AttributeError, match="'Engine' object has no attribute") as error:
        _ = engine.optimizer
    assert not isinstance(error.value, EvaluationOnlyError)


def test_a_model_with_nothing_to_train_can_be_evaluated():
    model = make_model().requires_grad_(False)
    engine = zero_core.build(model, _config(3), is_training=False)
    assert torch.isfinite(engine(**batch(0, 0, 0))["loss"])


def test_keys_that_only_a_training_uses_are_told_and_objects_refused(caplog):
    config = Case(3, zero={"offload_optimizer": {"device": "cpu"}}).config()
    with caplog.at_level(logging.INFO, "zero_core"):
        zero_core.build(make_model(), config, is_training=False)
    assert "optimizer, zero_optimization.offload_optimizer not used" in caplog.text
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match="uses no optimizer"):
        zero_core.build(model, config, optimizer=optimizer, is_training=False)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_a_model_given_back_is_whole_and_trained_by_the_next_engine(ranks, stage):
    expected = make_model().state_dict()
    model = make_model()
    evaluated = zero_core.build(model, _config(stage), is_training=False, process_group=ranks)
    params = list(model.parameters())
    assert evaluated.unwrap() is model
    assert_same(dict(model.state_dict()), dict(expected))
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    assert model.head.weight is model.embed.weight
    engine = Case(stage).build(ranks, model)
    train(engine, [batch(step, 0, ranks.rank) for step in range(2)])
    assert not torch.equal(engine.full_state_dict()["embed.weight"], expected["embed.weight"])


def test_values_are_given_back_unrounded_where_asked():
    engine = Case(3, "bf16").build()
    expected = engine.full_state_dict(dtype=torch.float32)
    model = engine.unwrap(dtype=torch.float32)
    assert_same(dict(model.state_dict()), expected)


def test_a_parameter_that_repeats_one_value_or_starts_with_nan_is_no_empty_one():
    model = nn.Linear(2, 2)
    model.weight.data = torch.tensor(0.5).expand(2, 2)
    with torch.no_grad():
        model.bias[0] = torch.nan
    engine = zero_core.build(model, {"train_micro_batch_size_per_gpu": 1}, is_training=False)
    full = engine.full_state_dict()
    assert full["weight"].tolist() == [[0.5, 0.5]] * 2
    torch.testing.assert_close(full["bias"], model.bias.detach(), equal_nan=True)
