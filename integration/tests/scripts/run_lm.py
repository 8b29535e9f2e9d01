"""Train a tiny language model with the Trainer, in the style of transformers' run_clm.py.

The script names neither DeepSpeed nor zero-engine. ``--deepspeed FILE`` is Trainer's argument.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

VOCABULARY, LENGTH = 64, 16


@dataclass
class ModelArguments:
    model_name_or_path: str
    lora: bool = field(default=False)


@dataclass
class DataArguments:
    train_samples: int = field(default=64)
    eval_samples: int = field(default=8)


class Walks(Dataset):
    """Sequences with a constant step. Labels equal the inputs, or continue them if ``walks_on``."""

    def __init__(self, walks_on: bool, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(2, VOCABULARY, (samples, 1), generator=generator)
        step = torch.randint(1, 4, (samples, 1), generator=generator)
        walk = (start + step * torch.arange(2 * LENGTH)) % (VOCABULARY - 2) + 2
        here, there = walk[:, :LENGTH], walk[:, LENGTH:]
        self.inputs, self.labels = here, there if walks_on else here

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
    config = AutoConfig.from_pretrained(arguments.model_name_or_path)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_pretrained(arguments.model_name_or_path, config=config)
    if arguments.lora:
        from peft import LoraConfig, TaskType, get_peft_model

        kind = TaskType.SEQ_2_SEQ_LM if config.is_encoder_decoder else TaskType.CAUSAL_LM
        set_seed(0)
        model = get_peft_model(model, LoraConfig(task_type=kind, r=4, target_modules=["q", "v"]))
        model.print_trainable_parameters()
    return model


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, Seq2SeqTrainingArguments))
    model_arguments, data_arguments, training_arguments = parser.parse_args_into_dataclasses()
    set_seed(training_arguments.seed)
    model = make_model(model_arguments)
    walks_on = model.config.is_encoder_decoder
    evaluated = Walks(walks_on, data_arguments.eval_samples, seed=1)
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_arguments,
        train_dataset=Walks(walks_on, data_arguments.train_samples, seed=0),
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
