"""Trains a language model with the Trainer, in the shape of transformers' run_clm.py.

Nothing here knows of DeepSpeed or of zero-engine: ``--deepspeed FILE`` is the Trainer's own
argument. Models are tiny and start from random weights; the data are made here.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

VOCABULARY, LENGTH = 64, 16

CONFIGS = {
    "gpt2": dict(
        vocab_size=VOCABULARY,
        n_positions=2 * LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    ),
    "t5": dict(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    ),
}


@dataclass
class ModelArguments:
    """What to train."""

    model_type: str = field(default="gpt2")
    lora: bool = field(default=False)


@dataclass
class DataArguments:
    """How much of it."""

    train_samples: int = field(default=64)
    eval_samples: int = field(default=8)


class Walks(Dataset):
    """Each sample walks through the vocabulary by steps of its own; T5 is asked to walk on."""

    def __init__(self, model_type: str, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(2, VOCABULARY, (samples, 1), generator=generator)
        step = torch.randint(1, 4, (samples, 1), generator=generator)
        walk = (start + step * torch.arange(2 * LENGTH)) % (VOCABULARY - 2) + 2
        here, there = walk[:, :LENGTH], walk[:, LENGTH:]
        self.inputs, self.labels = here, here if model_type == "gpt2" else there

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.inputs[index]
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": self.labels[index],
        }


def make_model(arguments: ModelArguments):
    config = CONFIG_MAPPING[arguments.model_type](**CONFIGS[arguments.model_type])
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_config(config)
    if arguments.lora:
        from peft import LoraConfig, get_peft_model

        targets = ["q", "v"] if config.is_encoder_decoder else ["c_attn"]
        task = "SEQ_2_SEQ_LM" if config.is_encoder_decoder else "CAUSAL_LM"
        model = get_peft_model(model, LoraConfig(task_type=task, r=4, target_modules=targets))
    return model


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, Seq2SeqTrainingArguments))
    model_arguments, data_arguments, training_arguments = parser.parse_args_into_dataclasses()
    set_seed(training_arguments.seed)
    model = make_model(model_arguments)
    kind = model_arguments.model_type
    evaluated = Walks(kind, data_arguments.eval_samples, seed=1)
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_arguments,
        train_dataset=Walks(kind, data_arguments.train_samples, seed=0),
        eval_dataset=evaluated,
    )
    folder = Path(training_arguments.output_dir)
    if training_arguments.do_train:
        last = get_last_checkpoint(folder) if folder.is_dir() else None
        trainer.train(resume_from_checkpoint=last)
        trainer.save_model()
        trainer.save_state()
    metrics = trainer.evaluate()
    if training_arguments.predict_with_generate:
        predicted = trainer.predict(evaluated, max_new_tokens=6, min_new_tokens=6).predictions
    else:
        prompt = evaluated.inputs[:2]
        predicted = trainer.model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
        )
    if trainer.is_world_process_zero():
        result = {
            "eval_loss": metrics["eval_loss"],
            "generated": predicted.tolist(),
            "world_size": training_arguments.world_size,
            "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        }
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
