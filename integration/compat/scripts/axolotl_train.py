"""Training by the calls that axolotl makes.

Several rows are packed into one, with positions of their own. ``torch_compile`` and ``bf16`` are
the Trainer's, as in axolotl's YAML.
"""

from __future__ import annotations

from dataclasses import dataclass

import texts
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class ModelArguments:
    base_model: str
    dataset: str
    sequence_len: int = 96


def packed(tokenizer, rows: list[dict], length: int) -> list[dict[str, torch.Tensor]]:
    """Rows one after another, cut to ``length``; positions begin anew with each."""
    found, ids, positions = [], [], []
    for row in rows:
        one = [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]
        ids, positions = ids + one, [*positions, *range(len(one))]
        if len(ids) >= length:
            found.append(
                {
                    "input_ids": torch.tensor(ids[:length]),
                    "position_ids": torch.tensor(positions[:length]),
                    "labels": torch.tensor(ids[:length]),
                }
            )
            ids, positions = [], []
    return found


def main() -> None:
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    arguments, training = parser.parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(arguments.base_model)
    dtype = torch.bfloat16 if training.bf16 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(arguments.base_model, dtype=dtype)
    model.config.use_cache = False
    rows = packed(tokenizer, texts.read(arguments.dataset), arguments.sequence_len)
    trainer = Trainer(
        model=model, args=training, processing_class=tokenizer, train_dataset=texts.Rows(rows)
    )
    trainer.train()
    trainer.save_model(training.output_dir)


if __name__ == "__main__":
    main()
