"""An engine for evaluation alone: values in shards, nothing to train them; as the plain module."""

from __future__ import annotations

import logging

import pytest
import torch

import zero_core
from zero_core import ConfigError
from zero_core.testing import Case, batch, make_model, spawn


def _config(stage: int, dtype: str = "fp32") -> dict[str, object]:
    config = Case(stage, dtype).config()
    del config["optimizer"]
    return config


def _as_the_module(rank: int, world_size: int) -> None:
    for stage in (0, 2, 3):
        for dtype in ("fp32", "bf16"):
            plain = make_model()
            if dtype == "bf16":
                plain.to(torch.bfloat16)
            engine = zero_core.build(make_model(), _config(stage, dtype), is_training=False)
            engine.eval()
            for step in range(2):
                with torch.no_grad():
                    expected = plain(**batch(step, 0, rank))["logits"]
                found = engine(**batch(step, 0, rank))["logits"]
                assert torch.equal(found, expected)
                assert not found.requires_grad
            torch.testing.assert_close(
                engine.full_state_dict(), dict(plain.state_dict()), rtol=0.0, atol=0.0
            )
            with engine.gathered(params=[engine.module.gain]):
                assert engine.module.gain.item() == 1.0
            report = engine.memory_report()
            assert not [kind for kind, nbytes in report.items() if "grad" in kind and nbytes]
            numel = sum(p.numel() for p in plain.parameters())
            shares = world_size if stage == 3 else 1
            kept = report["parameters"] / (4 if dtype == "fp32" else 2)
            assert numel / shares <= kept < 2 * numel / shares + 1000  # and the padding


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_it_computes_what_the_plain_module_does_and_keeps_values_alone(world_size):
    spawn(_as_the_module, world_size)


def test_what_trains_is_refused(tmp_path):
    model = make_model()
    wanted = [p.requires_grad for p in model.parameters()]
    engine = zero_core.build(model, _config(0), is_training=False)
    assert [p.requires_grad for p in model.parameters()] == wanted
    loss = engine(**batch(0, 0, 0))["loss"]
    for refused in (
        lambda: engine.backward(loss),
        lambda: engine.scale(loss),
        engine.step,
        lambda: engine.clip_grad_norm_(1.0),
        lambda: engine.save_checkpoint(tmp_path),
    ):
        with pytest.raises(RuntimeError, match=r"is_training=True"):
            refused()
    with pytest.raises(RuntimeError, match="requires a gradient now"):
        engine.module(**batch(0, 0, 0))  # with gradients, past the engine


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
