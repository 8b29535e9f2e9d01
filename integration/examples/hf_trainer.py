"""Fine-tune a Hugging Face model with a ZeRO preset, named by `--zero`, without a JSON file.

torchrun --nproc-per-node 2 integration/examples/hf_trainer.py --zero stage3-offload
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from zero_engine.hf import ZeroTrainer

WINDOW = 64


def text_windows() -> list[dict[str, torch.Tensor]]:
    """Return windows of bytes from the source of a standard library module."""
    text = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()[: 1 << 15]
    windows = torch.tensor(list(text)).long().split(WINDOW)[:-1]
    return [{"input_ids": ids, "labels": ids} for ids in windows]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--zero", default="stage2")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", default="runs/hf_trainer")
    options = parser.parse_args()
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": WINDOW}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    trainer = ZeroTrainer(
        model=GPT2LMHeadModel(GPT2Config(vocab_size=256, **sizes, **ends)),
        args=TrainingArguments(
            output_dir=options.output,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.accelerator.is_available(),
        ),
        train_dataset=text_windows(),
        zero=options.zero,
    )
    trainer.train()
    trainer.save_model()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    if trainer.is_world_process_zero():
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
