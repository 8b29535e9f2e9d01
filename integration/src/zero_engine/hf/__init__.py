"""The engine behind Hugging Face's Trainer, without DeepSpeed's name and without a hook.

    trainer = ZeroTrainer(model=model, args=args, train_dataset=data, zero="stage3-offload")
    trainer.train()

`ZeroTrainer` and `ZeroSeq2SeqTrainer` are transformers' Trainers; ``zero`` is one of `PRESETS`, a
configuration, or the path of its JSON file.
"""

from zero_engine.hf.trainer import ZeroSeq2SeqTrainer, ZeroTrainer
from zero_engine.presets import PRESETS

__all__ = ["PRESETS", "ZeroSeq2SeqTrainer", "ZeroTrainer"]
