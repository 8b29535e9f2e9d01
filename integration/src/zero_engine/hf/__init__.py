"""Hugging Face's Trainer on this engine, without DeepSpeed's name and without an import hook.

    trainer = ZeroTrainer(model=model, args=args, train_dataset=data, zero="stage3-offload")
    trainer.train()

`ZeroTrainer` and `ZeroSeq2SeqTrainer` are transformers' Trainers, and `zero_trainer(SFTTrainer)`
makes another class of Trainer such a one. ``zero`` is a name of `PRESETS`, a configuration, or the
path of a JSON file.
"""

try:
    import accelerate as _accelerate  # type: ignore[import-untyped]  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "zero_engine.hf needs the packages transformers and accelerate, which cannot be imported "
        f'({error}): pip install "./integration[hf]" in a checkout'
    ) from error

from zero_engine.hf.trainer import ZeroSeq2SeqTrainer, ZeroTrainer, zero_trainer
from zero_engine.presets import PRESETS

__all__ = ["PRESETS", "ZeroSeq2SeqTrainer", "ZeroTrainer", "zero_trainer"]
