"""Training of a language model with the calls of Lightning's DeepSpeed pages.

It uses a strategy given by name or as an object, ``configure_model``, deepspeed's Adam on the host,
and a checkpoint.
"""

from __future__ import annotations

import lightning.pytorch as pl
import measured
import texts
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


class LanguageModel(pl.LightningModule):
    """Language model created in ``configure_model``, where stage 3 shards parameters."""

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
    """Records each training batch, which is one optimizer step here."""

    def on_train_batch_start(self, *_args) -> None:
        self.timer = measured.step()
        self.step = self.timer.__enter__()

    def on_train_batch_end(self, _trainer, _module, outputs, *_args) -> None:
        self.step.loss = outputs["loss"]
        self.timer.__exit__(None, None, None)


def main() -> None:
    args = texts.parser("strategy").parse_args()  # Lightning's name, or in_code
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
