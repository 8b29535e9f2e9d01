"""Trains a tiny model with the Trainer for each given value of ``--optim``.

This file does not mention DeepSpeed or zero-engine. ``--deepspeed FILE`` is an argument of the
Trainer.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

# At width 64 some matrices have at least 4096 elements, the least that 8-bit optimizers quantize.
CONFIG = GPT2Config(vocab_size=96, n_positions=16, n_embd=64, n_layer=2, n_head=2, resid_pdrop=0.0)


class Walks(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (index + torch.arange(16) * (1 + index % 3)) % 96
        return {"input_ids": ids, "labels": ids}


def losses_of(word: str, arguments: list[str]) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        given = [*arguments, f"--optim={word}", f"--output_dir={folder}", "--max_steps=5"]
        given += ["--logging_steps=1", "--per_device_train_batch_size=2", "--report_to=none"]
        given += ["--learning_rate=1e-3", "--disable_tqdm=true", "--save_strategy=no"]
        given += ["--weight_decay=0.1", "--max_grad_norm=0.5", "--gradient_accumulation_steps=2"]
        (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(given)
        torch.manual_seed(0)
        trainer = Trainer(model=GPT2LMHeadModel(CONFIG), args=args, train_dataset=Walks())
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    output, words, *arguments = sys.argv[1:]
    # Skips torchao's compilation of the update, which takes minutes.
    torch.compiler.set_stance("force_eager")
    found = {word: losses_of(word, arguments) for word in words.split(",")}
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        Path(output).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
