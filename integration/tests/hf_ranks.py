"""What the ranks of test_hf_trainer.py do: Trainers on tiny models, plain ones and the engine's.

Each program writes what it found as JSON, for the tests to look at: starting ranks takes longer
than all that they do.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    EvalPrediction,
    GPT2Config,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from zero_core import CheckpointError
from zero_core.step.speculation import updates_in_backward
from zero_engine.hf import ZeroSeq2SeqTrainer, ZeroTrainer

VOCAB = 61
STAGES = ("stage1", "stage2", "stage3", "stage2-offload", "stage3-offload-params")
SAVED_STEP = 3


def join(rank: int, world_size: int) -> None:
    """Tell this rank where it is, as torchrun does."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    os.environ.update({k: str(v) for k, v in told.items()}, LOCAL_WORLD_SIZE=str(world_size))


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": VOCAB, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **ends, **still))


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, **ends, num_heads=2, dropout_rate=0.0))


def rows(count: int, seed: int = 1) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (count, 9), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def arguments(folder: str, kind: Any = TrainingArguments, **changes: Any) -> Any:
    """Two samples per rank where there are two ranks, four in all; an epoch ends in half a step."""
    world_size = int(os.environ["WORLD_SIZE"])
    settings: dict[str, Any] = {
        "output_dir": folder,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4 // world_size,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-4,  # a gradient of zero, but for rounding, shall move nothing
        "weight_decay": 0.1,
        "max_grad_norm": 0.8,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return kind(**{**settings, **changes})


def history(trainer: Trainer) -> list[dict[str, float]]:
    return [row for row in trainer.state.log_history if "loss" in row]


def write(folder: str, rank: int, found: Any) -> None:
    (Path(folder) / f"found-{rank}.json").write_text(json.dumps(found))


class StepEnds(TrainerCallback):  # type: ignore[misc]
    """Counts what a Trainer tells its callbacks."""

    def __init__(self) -> None:
        self.counts = {"pre_optimizer_step": 0, "optimizer_step": 0, "substep_end": 0}

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.counts["pre_optimizer_step"] += 1

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.counts["optimizer_step"] += 1

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self.counts["substep_end"] += 1


# ------------------------------------------------------------------------ programs


def on_two_ranks(rank: int, world_size: int, folder: str) -> None:
    """Every program but `resume`, each in its own folder."""
    join(rank, world_size)
    for program in (train_all, generate, adapt):
        place = Path(folder) / program.__name__
        place.mkdir(exist_ok=True)
        program(rank, str(place))


def train_all(rank: int, folder: str) -> None:
    """The plain Trainer, and the engine's for every preset; the last leaves a checkpoint."""
    found: dict[str, Any] = {}
    plain = Trainer(model=gpt2(), args=arguments(folder), train_dataset=rows(20))
    plain.train()
    values = {name: value.clone() for name, value in plain.model.state_dict().items()}
    found["plain"] = history(plain)
    for zero in STAGES:
        ends = StepEnds()
        is_last = zero == STAGES[-1]
        trainer = ZeroTrainer(
            model=gpt2(),
            args=arguments(
                f"{folder}/run",
                gradient_checkpointing=zero == "stage3",
                **({"save_strategy": "steps", "save_steps": SAVED_STEP} if is_last else {}),
            ),
            train_dataset=rows(20),
            callbacks=[ends],
            zero=zero,
        )
        trainer.train()
        assert trainer.engine is not None
        full = trainer.engine.full_state_dict()
        gap = max((full[name] - value).abs().max().item() for name, value in values.items())
        trainer.save_model(f"{folder}/{zero}")
        torch.distributed.barrier()
        saved = GPT2LMHeadModel.from_pretrained(f"{folder}/{zero}").state_dict()
        assert all(torch.equal(saved[name], value) for name, value in full.items())
        found[zero] = {"history": history(trainer), "gap": gap, "counts": dict(ends.counts)}
        if zero == "stage3":
            plain.train()
            trainer.train()
            found["twice"] = {"plain": history(plain), "zero": history(trainer)}
    found["unclipped"] = _unclipped(folder)
    for precision in ("bf16", "fp16"):
        args = arguments(f"{folder}/low", **{precision: True})
        low = ZeroTrainer(model=gpt2(), args=args, train_dataset=rows(20), zero="stage2")
        low.train()
        found[precision] = {
            "history": history(low),
            "dtype": str(next(low.model.parameters()).dtype),
        }
    write(folder, rank, found)


def _unclipped(folder: str) -> dict[str, Any]:
    """Nothing calls a step off: the engine updates on the host while backward goes on."""
    args = arguments(folder, max_grad_norm=0.0)
    plain = Trainer(model=gpt2(), args=args, train_dataset=rows(20))
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    zero = {"check_grad_overflow": False, "zero_optimization": offload}
    trainer = ZeroTrainer(model=gpt2(), args=args, train_dataset=rows(20), zero=zero)
    for one in (plain, trainer):
        one.train()
    assert trainer.engine is not None
    assert updates_in_backward(trainer.engine.config)
    return {"plain": history(plain), "zero": history(trainer)}


def resume(rank: int, world_size: int, folder: str) -> None:
    """Go on from the checkpoint that `train_all` left, at another stage and world size."""
    join(rank, world_size)
    trainer = ZeroTrainer(
        model=gpt2(), args=arguments(f"{folder}/again"), train_dataset=rows(20), zero="stage1"
    )
    saved = f"{folder}/run/checkpoint-{SAVED_STEP}"
    trainer.train(resume_from_checkpoint=saved)
    num_steps = trainer.engine.global_steps
    trainer.lr_scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2)
    with pytest.raises(CheckpointError, match="StepLR needs 'gamma'"):
        trainer._load_optimizer_and_scheduler(saved)
    assert trainer.engine.global_steps == num_steps > SAVED_STEP  # nothing was loaded
    place = Path(folder) / "resumed"
    place.mkdir()
    write(str(place), rank, history(trainer))


def generate(rank: int, folder: str) -> None:
    """A T5, evaluated before and after training, by loss and by what it writes."""

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        tokens = torch.as_tensor(prediction.predictions)
        return {"checksum": float((tokens * torch.arange(1, tokens.shape[1] + 1)).sum())}

    found = {}
    for name, kind, further in (
        ("plain", Seq2SeqTrainer, {}),
        ("zero", ZeroSeq2SeqTrainer, {"zero": "stage3"}),
    ):
        args = arguments(
            folder,
            Seq2SeqTrainingArguments,
            predict_with_generate=True,
            generation_max_length=7,
            per_device_eval_batch_size=2,
        )
        settings = {
            "args": args,
            "train_dataset": rows(12),
            "eval_dataset": rows(7, seed=2),
            "compute_metrics": compute,
            **further,
        }
        trainer = kind(model=t5(), **settings)
        before = trainer.evaluate()
        if name == "plain":
            # Evaluated first, it trains without DDP, each rank by itself (transformers 5.23).
            trainer = kind(model=t5(), **settings)
        trainer.train()
        after = trainer.evaluate()
        keys = ("eval_loss", "eval_checksum")
        found[name] = [[m[key] for key in keys] for m in (before, after)]
    write(folder, rank, found)


def adapt(rank: int, folder: str) -> None:
    """LoRA, with the best checkpoint loaded at the end, and saved; beside the plain Trainer."""
    found = {}
    for name, kind, further, is_alone in (
        ("plain", Trainer, {}, False),
        ("zero", ZeroTrainer, {"zero": "stage3"}, False),
        ("weights alone", ZeroTrainer, {"zero": "stage3"}, True),
    ):
        lora = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
        place = f"{folder}/{name}"
        trainer = kind(
            model=peft.get_peft_model(gpt2(), lora),
            args=arguments(
                place,
                learning_rate=0.1,  # the loss of the evaluation rises again
                adam_epsilon=1e-8,
                eval_strategy="steps",
                eval_steps=1,
                save_strategy="steps",
                save_steps=1,
                save_only_model=is_alone,
                load_best_model_at_end=True,
            ),
            train_dataset=rows(12),
            eval_dataset=rows(7, seed=2),
            **further,
        )
        trainer.train()
        trainer.save_model(f"{place}/final")
        found[name] = {
            "best": trainer.state.best_metric,
            "best_step": trainer.state.best_global_step,
            "last_step": trainer.state.global_step,
            "loaded": trainer.evaluate()["eval_loss"],
        }
    torch.distributed.barrier()
    saved = {name: load_file(f"{folder}/{name}/final/adapter_model.safetensors") for name in found}
    for name, adapter in saved.items():
        assert adapter.keys() == saved["plain"].keys()
        gaps = [(adapter[key] - value).abs().max() for key, value in saved["plain"].items()]
        found[name]["gap"] = max(gaps).item()
    write(folder, rank, found)
