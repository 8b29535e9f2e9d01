"""A training script for a translation task, with the arguments of transformers' script of 2021."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from run_lm import Walks
from transformers import (
    AutoModelForSeq2SeqLM,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)


@dataclass
class ModelArguments:
    """The model to train."""

    model_name_or_path: str


@dataclass
class DataTrainingArguments:
    """The task and its numbers of samples."""

    task: str = field(default="summarization")
    n_train: int = field(default=-1)
    n_val: int = field(default=-1)


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, Seq2SeqTrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    torch.manual_seed(0)
    trainer = Seq2SeqTrainer(
        model=AutoModelForSeq2SeqLM.from_pretrained(model_args.model_name_or_path),
        args=training_args,
        train_dataset=Walks(True, data_args.n_train, seed=0),
        eval_dataset=Walks(True, data_args.n_val, seed=1),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        found = {"losses": losses, "eval_loss": metrics["eval_loss"], "task": data_args.task}
        found["world_size"] = int(os.environ["WORLD_SIZE"])
        Path("result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
