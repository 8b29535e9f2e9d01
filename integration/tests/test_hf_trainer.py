"""ZeroTrainer: its config from TrainingArguments, and its training compared with Trainer's DDP."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from safetensors.torch import load_file
from transformers import (
    EvalPrediction,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests.support.lm_models import make_lm, token_rows
from zero_core import CheckpointError, ConfigError, load_config
from zero_core.testing import spawn
from zero_engine.hf import ZeroSeq2SeqTrainer, ZeroTrainer
from zero_engine.hf.trainer import (
    ZeroAccelerator,
    ZeroOptimizer,
    fill_config,
    fill_schedule,
    read_zero,
)

STAGES = ("stage1", "stage2", "stage3", "stage2-offload", "stage3-offload-params")
SAVED_STEP = 3


def _join(rank: int, world_size: int) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    os.environ.update({k: str(v) for k, v in names.items()}, LOCAL_WORLD_SIZE=str(world_size))


def _arguments(folder: Path | str, kind: Any = TrainingArguments, **changes: Any) -> Any:
    """Return arguments for steps of two micro-batches, and one in an epoch's last step."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4 // int(os.environ["WORLD_SIZE"]),
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-4,  # so large that rounding errors of a zero gradient move no value
        "weight_decay": 0.1,
        "max_grad_norm": 0.8,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return kind(**{**settings, **changes})


def _trained(
    folder: Path, zero: Any = None, callbacks: Any = None, resumes: Any = None, **changes: Any
) -> Trainer:
    settings = {"model": make_lm("gpt2"), "args": _arguments(folder, **changes)}
    settings |= {"train_dataset": token_rows(20), "callbacks": callbacks}
    trainer = Trainer(**settings) if zero is None else ZeroTrainer(**settings, zero=zero)
    trainer.train(resume_from_checkpoint=resumes)
    return trainer


def _logged(trainer: Trainer, key: str) -> Any:
    return [row[key] for row in trainer.state.log_history if "loss" in row]


def _check_same(found: Trainer, plain: Trainer, abs_loss: float, rel_norm: float) -> None:
    # An epoch has 5 batches per rank and 2 batches per step, so its third step has one batch.
    assert len(_logged(found, "loss")) == 6
    assert _logged(found, "loss") == pytest.approx(_logged(plain, "loss"), abs=abs_loss)
    norms = _logged(plain, "grad_norm")
    assert _logged(found, "grad_norm") == pytest.approx(norms, rel=rel_norm)
    assert _logged(found, "learning_rate") == _logged(plain, "learning_rate")


class _StepEnds(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.counts = Counter[str]()
        for name in ("pre_optimizer_step", "optimizer_step", "substep_end"):
            setattr(self, f"on_{name}", lambda *_, name=name, **__: self.counts.update([name]))


def _trains(folder: Path) -> None:
    plain = _trained(folder)
    values = {name: value.clone() for name, value in plain.model.state_dict().items()}
    norms = _logged(plain, "grad_norm")
    assert min(norms) < 0.8 < max(norms), "some are clipped"
    for zero in STAGES:
        ends, saves = _StepEnds(), {"save_strategy": "steps", "save_steps": SAVED_STEP}
        trainer = _trained(
            folder / "run",
            zero,
            [ends],
            gradient_checkpointing=zero == "stage3",
            **(saves if zero == STAGES[-1] else {}),
        )
        _check_same(trainer, plain, 2e-6, 1e-5)
        assert ends.counts == {"pre_optimizer_step": 6, "optimizer_step": 6, "substep_end": 4}
        full = trainer.engine.full_state_dict()
        for name, value in values.items():
            torch.testing.assert_close(full[name], value, rtol=0.0, atol=1e-6)
        trainer.save_model(str(folder / zero))
        torch.distributed.barrier()
        saved = type(trainer.model).from_pretrained(folder / zero).state_dict()
        torch.testing.assert_close(dict(saved), full, rtol=0.0, atol=0.0)
        if zero == "stage3":
            again, anew = _trained(folder), trainer
            for one in (again, anew):
                one.train()
            _check_same(anew, again, 5e-6, 1e-4)


def _trains_in_16_bits(folder: Path) -> None:
    plain = _logged(_trained(folder, num_train_epochs=1), "loss")
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        low = _trained(folder, "stage2", num_train_epochs=1, **{precision: True})
        assert next(low.model.parameters()).dtype == dtype
        assert _logged(low, "loss")[:2] == pytest.approx(plain[:2], abs=0.05)
        rows = [row for row in low.state.log_history if "loss" in row]
        assert all(("loss_scale" in row) == (precision == "fp16") for row in rows)


def _generates(folder: Path) -> None:
    def compute(prediction: EvalPrediction) -> dict[str, float]:
        tokens = torch.as_tensor(prediction.predictions)
        return {"checksum": float((tokens * torch.arange(1, tokens.shape[1] + 1)).sum())}

    found = []
    for kind, further in ((Seq2SeqTrainer, {}), (ZeroSeq2SeqTrainer, {"zero": "stage3"})):
        options = {"predict_with_generate": True, "generation_max_length": 5}
        options |= {"per_device_eval_batch_size": 2}
        args = _arguments(folder, Seq2SeqTrainingArguments, **options)
        settings = {"args": args, "train_dataset": token_rows(12), "compute_metrics": compute}
        settings |= {"eval_dataset": token_rows(7, seed=2), **further}
        trainer = kind(model=make_lm("t5"), **settings)
        before = trainer.evaluate()
        if kind is Seq2SeqTrainer:
            # An earlier evaluation makes Trainer train without DDP (transformers 5.23).
            trainer = kind(model=make_lm("t5"), **settings)
        trainer.train()
        after = trainer.evaluate()
        found.append([m[f"eval_{key}"] for m in (before, after) for key in ("loss", "checksum")])
    plain, zero = found
    assert zero[:2] != zero[2:]
    assert zero == pytest.approx(plain, abs=1e-5)


def _adapts(folder: Path) -> None:
    """Train LoRA with Trainer and with the engine, reload the best checkpoint and save it."""
    found, saved = {}, {}
    for name, kind, further in (
        ("plain", Trainer, {}),
        ("zero", ZeroTrainer, {"zero": "stage3"}),
        ("weights alone", ZeroTrainer, {"zero": "stage3"}),
    ):
        lora = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
        trainer = kind(
            model=peft.get_peft_model(make_lm("gpt2"), lora),
            args=_arguments(
                folder / name,
                max_steps=3,
                learning_rate=0.2,  # so large that the evaluation loss rises again
                adam_epsilon=1e-8,
                **{f"{what}_strategy": "steps" for what in ("eval", "save")},
                **{f"{what}_steps": 1 for what in ("eval", "save")},
                save_only_model=name == "weights alone",
                load_best_model_at_end=True,
            ),
            train_dataset=token_rows(12),
            eval_dataset=token_rows(5, seed=2),
            **further,
        )
        trainer.train()
        trainer.save_model(str(folder / name / "final"))
        torch.distributed.barrier()
        saved[name] = load_file(folder / name / "final" / "adapter_model.safetensors")
        found[name] = state = trainer.state
        assert state.best_global_step == found["plain"].best_global_step < state.global_step
        assert state.best_metric == pytest.approx(found["plain"].best_metric, abs=1e-5)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(state.best_metric, abs=1e-6)
        torch.testing.assert_close(saved[name], saved["plain"], rtol=0.0, atol=1e-5)


def _run(rank: int, world_size: int, program: Callable[[Path], None], folder: Path) -> None:
    _join(rank, world_size)
    program(folder)


def _resumes(folder: Path) -> None:
    # The order is drawn from torch's generator, and the first save is within the first epoch.
    drawn = {"accelerator_config": {"use_seedable_sampler": False}}
    whole = _trained(folder, "stage2", save_strategy="steps", save_steps=2, **drawn)
    again = _trained(folder, "stage3", resumes=str(folder / "checkpoint-2"), **drawn)
    assert _logged(again, "loss") == _logged(whole, "loss")
    plain, saved = _trained(folder), str(folder / "run" / f"checkpoint-{SAVED_STEP}")
    trainer = _trained(folder, "stage1", resumes=saved)
    for key in ("step", "loss", "learning_rate"):
        assert _logged(trainer, key) == pytest.approx(_logged(plain, key), abs=1e-5)
    num_steps = trainer.engine.global_steps
    trainer.lr_scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2)
    with pytest.raises(CheckpointError, match="StepLR needs 'gamma'"):
        trainer._load_optimizer_and_scheduler(saved)
    assert trainer.engine.global_steps == num_steps > SAVED_STEP


def test_presets_train_as_the_plain_trainer_and_resume_elsewhere(tmp_path: Path) -> None:
    spawn(_run, 2, _trains, tmp_path)
    spawn(_run, 1, _resumes, tmp_path)


@pytest.mark.parametrize("program", [_trains_in_16_bits, _generates, _adapts])
def test_engine_is_like_the_plain_trainer(program: Any, tmp_path: Path) -> None:
    spawn(_run, 2, program, tmp_path)


def _defaults(tmp_path: Path, **changes: Any) -> TrainingArguments:
    settings = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    return TrainingArguments(**{**settings, **changes})


def test_unknown_preset_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'stage3-offload'\?.*stage3-zeropp"):
        read_zero("stage3_ofload")


def test_auto_is_filled_in_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zero = {"stage": 3, "reduce_bucket_size": "auto", "zero_hpz_partition_size": "auto"}
    given = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto", "initial_scale_power": 8},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": None, "betas": "auto", "eps": 1e-8}},
    }
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(given))
    args = _defaults(
        tmp_path, learning_rate=3e-4, adam_beta2=0.95, warmup_steps=5, gradient_accumulation_steps=2
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(TrainingArguments, "world_size", 4)
    config = load_config(fill_config(read_zero(path), args), world_size=4)
    assert (config.train_batch_size, config.gradient_clipping) == (64, 1.0)
    assert (config.fp16.enabled, config.fp16.initial_scale_power) == (False, 8)
    assert config.zero_optimization.zero_hpz_partition_size == 2
    assert config.optimizer is not None
    assert config.optimizer.params == {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8}
    nulls = dict.fromkeys(("zero_optimization", "optimizer", "scheduler", "bf16", "fp16"))
    assert (read_zero(nulls), fill_config(nulls, args)) == ({}, fill_config({}, args))
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
        ({"optimizer": {"type": "Lion", "params": [1]}}, ("optimizer.params: expected a block",)),
    ],
)
def test_all_that_does_not_fit_the_arguments_is_named(given, messages, tmp_path):
    with pytest.raises(ConfigError) as caught:
        fill_config(given, _defaults(tmp_path))
    for text in messages:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("mine", "theirs", "own"),
    [
        (ZeroTrainer, Trainer, {"_start_engine", "_check_device", "_writable"}),
        (ZeroAccelerator, Accelerator, {"adopt", "_engine"}),
        (ZeroOptimizer, AcceleratedOptimizer, set()),
    ],
)
def test_what_is_overridden_is_there_to_override(mine: type, theirs: type, own: set[str]) -> None:
    """An override of a method that the library has renamed would never run."""
    names = {n for n, v in vars(mine).items() if callable(v) or isinstance(v, property)} - own
    assert names - {"__init__"}
    assert {name for name in names if not hasattr(theirs, name)} == set()


@pytest.mark.parametrize("name", ["bf16_full_eval", "torch_compile"])
def test_arguments_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    args = _defaults(tmp_path)
    setattr(args, name, True)
    with pytest.raises(ConfigError, match=f"TrainingArguments.{name}=True.*zero="):
        ZeroTrainer(model=make_lm("gpt2"), args=args, train_dataset=token_rows(4), zero="stage2")


def test_model_without_training_data_is_evaluated_without_optimizer_state(tmp_path: Path) -> None:
    model, args = make_lm("gpt2"), _defaults(tmp_path, disable_tqdm=True)
    further = {"args": args, "eval_dataset": token_rows(5)}
    plain = Trainer(model=make_lm("gpt2"), **further).evaluate()["eval_loss"]
    trainer = ZeroTrainer(model=model, **further, zero="stage3-offload")
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
    params = {"warmup_max_lr": "auto", "warmup_num_steps": 2, "warmup_type": "linear"}
    given = {
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "SGD", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {**params, "warmup_min_lr": None}},
    }
    args = _defaults(tmp_path, max_steps=4, logging_steps=1, learning_rate=0.5, disable_tqdm=True)
    data = token_rows(32)
    trainer = ZeroTrainer(model=make_lm("gpt2"), args=args, train_dataset=data, zero=given)
    trainer.train()
    assert type(trainer.optimizer.optimizer.given).__name__ == "SGD"
    rates = [r["learning_rate"] for r in trainer.state.log_history if "loss" in r]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1] == 0.5
