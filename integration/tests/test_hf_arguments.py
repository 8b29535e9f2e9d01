"""Presets and "auto": a configuration from TrainingArguments and ``zero``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments

from tests.support.lm_models import make_lm, token_rows
from zero_core import ConfigError, load_config
from zero_engine.hf import PRESETS, ZeroSeq2SeqTrainer, ZeroTrainer
from zero_engine.hf.accelerator import ZeroAccelerator, ZeroOptimizer
from zero_engine.hf.arguments import fill_config, fill_schedule, read_zero
from zero_engine.script.sharded_ddp import tell_after


def _arguments(tmp_path: Path, **changes: Any) -> TrainingArguments:
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    return TrainingArguments(**{**settings, **changes})


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_a_whole_configuration(name: str, tmp_path: Path) -> None:
    args = _arguments(tmp_path, gradient_accumulation_steps=3, max_grad_norm=0.5, bf16=True)
    config = load_config(fill_config(read_zero(name), args), world_size=1)
    assert f"stage{config.zero_optimization.stage}" == name.partition("-")[0]
    is_on_host = "offload" in name or "twin-flow" in name
    assert (config.zero_optimization.offload_optimizer.device == "cpu") == is_on_host
    sizes = (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps)
    assert (*sizes, config.gradient_clipping, config.bf16.enabled) == (8, 3, 0.5, True)


def test_unknown_preset_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'stage3-offload'\?.*stage3-zeropp"):
        read_zero("stage3_ofload")


def test_auto_is_filled_in_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secondary shards stay within a node, and a schedule gets the number of training steps."""
    zero = {"stage": 3, "reduce_bucket_size": "auto", "zero_hpz_partition_size": "auto"}
    given = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto", "initial_scale_power": 8},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-8}},
    }
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(given))
    args = _arguments(
        tmp_path,
        learning_rate=3e-4,
        adam_beta2=0.95,
        warmup_steps=5,
        gradient_accumulation_steps=2,
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(TrainingArguments, "world_size", 4)
    config = load_config(fill_config(read_zero(path), args), world_size=4)
    assert (config.train_batch_size, config.gradient_clipping) == (64, 1.0)
    assert (config.fp16.enabled, config.fp16.initial_scale_power) == (False, 8)
    assert config.zero_optimization.zero_hpz_partition_size == 2
    assert config.optimizer is not None
    assert config.optimizer.params == {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8}
    auto = dict.fromkeys(("warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    assert fill_schedule({**auto, "warmup_type": "linear"}, args, 40) == {
        "warmup_max_lr": 3e-4,
        "warmup_num_steps": 5,
        "total_num_steps": 40,
        "warmup_type": "linear",
    }


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        (
            {
                "train_micro_batch_size_per_gpu": 4,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 1.0}},
            },
            ("size_per_gpu = 4, TrainingArguments: 8", "bf16.enabled", "optimizer.params.lr"),
        ),
        ({"scheduler": {"params": {}}}, ("scheduler.type: Field required",)),
    ],
)
def test_all_that_does_not_fit_the_arguments_is_named(given, messages, tmp_path):
    with pytest.raises(ConfigError) as caught:
        fill_config(given, _arguments(tmp_path))
    for text in messages:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("mine", "theirs", "own"),
    [
        (ZeroTrainer, Trainer, {"_start_engine", "_check_device", "_writable"}),
        (ZeroSeq2SeqTrainer, Seq2SeqTrainer, set()),
        (ZeroAccelerator, Accelerator, {"adopt", "_engine"}),
        (ZeroOptimizer, AcceleratedOptimizer, set()),
    ],
)
def test_what_is_overridden_is_there_to_override(mine: type, theirs: type, own: set[str]) -> None:
    """An override of a method that a release has renamed would never run."""
    names = {n for n, v in vars(mine).items() if callable(v) or isinstance(v, property)} - own
    assert names - {"__init__"}
    assert {name for name in names if not hasattr(theirs, name)} == set()


@pytest.mark.parametrize("name", ["bf16_full_eval", "torch_compile"])
def test_arguments_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    args = _arguments(tmp_path)
    setattr(args, name, True)
    with pytest.raises(ConfigError, match=f"TrainingArguments.{name}=True.*zero="):
        ZeroTrainer(model=make_lm("gpt2"), args=args, train_dataset=token_rows(4), zero="stage2")


def test_model_without_training_data_is_evaluated_without_optimizer_state(tmp_path: Path) -> None:
    model, args = make_lm("gpt2"), _arguments(tmp_path, disable_tqdm=True)
    plain = Trainer(model=make_lm("gpt2"), args=args, eval_dataset=token_rows(5)).evaluate()[
        "eval_loss"
    ]
    trainer = ZeroTrainer(model=model, args=args, eval_dataset=token_rows(5), zero="stage3-offload")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain, abs=1e-6)
    assert trainer.engine is not None
    assert "gradient shards" not in {k for k, v in trainer.engine.memory_report().items() if v}
    trainer.train_dataset = token_rows(4)
    with pytest.raises(RuntimeError, match=r"train_dataset.*trainer.engine.unwrap"):
        trainer.train()
    assert trainer.engine.unwrap() is model
    again = ZeroTrainer(model=model, args=args, train_dataset=token_rows(4), zero="stage3-offload")
    assert again.evaluate(token_rows(5))["eval_loss"] == pytest.approx(plain, abs=1e-6)


def test_configured_optimizer_and_schedule_are_used(tmp_path: Path) -> None:
    given = {
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "SGD", "params": {"lr": "auto"}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": "auto", "warmup_num_steps": 2, "warmup_type": "linear"},
        },
    }
    args = _arguments(tmp_path, max_steps=4, logging_steps=1, learning_rate=0.5, disable_tqdm=True)
    trainer = ZeroTrainer(
        model=make_lm("gpt2"), args=args, train_dataset=token_rows(32), zero=given
    )
    trainer.train()
    assert type(trainer.optimizer.optimizer.given).__name__ == "SGD"
    rates = [r["learning_rate"] for r in trainer.state.log_history if "loss" in r]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1] == 0.5


def test_sharded_ddp_in_code_is_answered_with_the_way_over(capsys):
    show = tell_after(lambda *error: None)
    for word in ("sharded_ddp", "something_else"):
        with pytest.raises(TypeError, match=word) as caught:
            TrainingArguments(output_dir="out", **{word: "simple"})
        show(caught.type, caught.value, None)
        assert ('deepspeed="zero.json"' in capsys.readouterr().err) is (word == "sharded_ddp")
