"""Masked language modelling with the calls of DeepSpeedExamples' train_bert_ds.py.

It trains a Roberta with a configuration in the program, saves a checkpoint that holds the step, and
resumes from the checkpoint.
"""

from __future__ import annotations

import deepspeed
import measured
import texts
import torch
from deepspeed.accelerator import get_accelerator
from transformers import AutoModelForMaskedLM, AutoTokenizer

BATCH_SIZE, STEPS = 8, 8


def batches(tokenizer, rows: list[dict], size: int, rank: int, ranks: int):
    """Yield batches endlessly, with 15% of the tokens masked. Every rank draws the same numbers."""
    ids = torch.tensor([tokenizer(row["text"])["input_ids"] for row in rows])
    generator = torch.Generator().manual_seed(0)
    while True:
        chosen = torch.randint(len(ids), (ranks * size,), generator=generator)
        mask = torch.rand(ranks * size, ids.shape[1], generator=generator) < 0.15
        one = slice(rank * size, (rank + 1) * size)
        tokens, hidden = ids[chosen][one], mask[one]
        yield {
            "input_ids": tokens.masked_fill(hidden, tokenizer.mask_token_id),
            "attention_mask": torch.ones_like(tokens),
            "labels": tokens.masked_fill(~hidden, -100),
        }


def main() -> None:
    args = texts.parser("--local_rank").parse_args()
    device = get_accelerator().device_name(int(args.local_rank or -1))
    deepspeed.init_distributed()
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    def make():
        model = AutoModelForMaskedLM.from_pretrained(args.model)
        ds_config = {
            "train_micro_batch_size_per_gpu": BATCH_SIZE,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        }
        engine, _, _, _ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=ds_config
        )
        return engine

    model = make()
    ranks = torch.distributed.get_world_size()
    source = batches(
        tokenizer, texts.read(args.dataset), BATCH_SIZE, torch.distributed.get_rank(), ranks
    )

    def train(first: int, last: int) -> None:
        model.train()
        for _ in range(first, last):
            batch = {name: tensor.to(device) for name, tensor in next(source).items()}
            with measured.step() as step:
                loss = model(**batch).loss
                model.backward(loss)
                model.step()
                step.loss = loss

    half = STEPS // 2
    train(0, half)
    model.save_checkpoint(save_dir=args.output_dir, client_state={"checkpoint_step": half})
    model = make()
    _, client_state = model.load_checkpoint(load_dir=args.output_dir)
    train(client_state["checkpoint_step"], STEPS)


if __name__ == "__main__":
    main()
