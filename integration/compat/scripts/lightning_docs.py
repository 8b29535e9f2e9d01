"""A language model by the calls of Lightning's DeepSpeed pages.

The strategy by its name or made in the program, ``configure_model`` (stage 3 makes it in shards),
Adam of deepspeed on the host, and a checkpoint.
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import measured
import texts
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


class LanguageModel(pl.LightningModule):
    """Made in ``configure_model``: stage 3 makes it in shards."""

    def __init__(self, path: str, *, adam_on_host: bool) -> None:
        super().__init__()
        self.path, self.adam_on_host = path, adam_on_host
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.path))

    def training_step(self, batch, _index):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        if self.adam_on_host:
            return DeepSpeedCPUAdam(self.parameters(), lr=1e-3)
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0)


class Steps(pl.Callback):
    """Records each step, which is one batch here."""

    def on_train_batch_start(self, *_args) -> None:
        self.timer = measured.step()
        self.step = self.timer.__enter__()

    def on_train_batch_end(self, _trainer, _module, outputs, *_args) -> None:
        self.step.loss = outputs["loss"]
        self.timer.__exit__(None, None, None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy", help="its name in Lightning, or in_code")
    parser.add_argument("--model")
    parser.add_argument("--dataset")
    parser.add_argument("--output_dir")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = [torch.tensor(tokenizer(row["text"])["input_ids"]) for row in texts.read(args.dataset)]
    strategy = args.strategy
    if strategy == "in_code":
        strategy = DeepSpeedStrategy(
            stage=3,
            offload_optimizer=True,
            offload_parameters=True,
            allgather_bucket_size=int(5e8),
        )
    on_host = args.strategy == "in_code" or args.strategy.endswith("offload")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        precision="32-true",
        max_steps=10,
        default_root_dir=args.output_dir,
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[Steps()],
    )
    module = LanguageModel(args.model, adam_on_host=on_host)
    trainer.fit(module, DataLoader(texts.Rows(ids), batch_size=8))
    trainer.save_checkpoint(f"{args.output_dir}/saved.ckpt")


if __name__ == "__main__":
    main()
