"""Hugging Face's Trainer on this engine, without DeepSpeed's name and without an import hook.

    trainer = ZeroTrainer(model=model, args=args, train_dataset=data, zero="stage3-offload")
    trainer.train()

`ZeroTrainer` and `ZeroSeq2SeqTrainer` are transformers' Trainers on this engine.
`zero_trainer(SFTTrainer)` derives the same from another Trainer. ``zero`` is a name of `PRESETS`, a
configuration, or the path of a JSON file.
"""

import functools
from typing import cast

try:
    import accelerate as _accelerate  # type: ignore[import-untyped]  # noqa: F401
    from transformers import Seq2SeqTrainer, Trainer
except ImportError as error:
    raise ImportError(
        "zero_engine.hf needs the packages transformers and accelerate, which cannot be imported "
        f'({error}): pip install "./integration[hf]" (in a clone of the repository)'
    ) from error

from zero_engine.hf.trainer import ZeroSeq2SeqTrainer, ZeroTrainer
from zero_engine.presets import PRESETS

__all__ = ["PRESETS", "ZeroSeq2SeqTrainer", "ZeroTrainer", "zero_trainer"]


@functools.cache
def zero_trainer(kind: type[Trainer]) -> type[ZeroTrainer]:
    """Return a subclass of ``kind`` and `ZeroTrainer`, with the argument ``zero`` of `ZeroTrainer`.

    ``kind`` is transformers' Trainer or derived from it. For TRL's trainers see [Note: TRL's
    readers of weights] in `zero_engine.hf.trl`. The same class is returned for the same ``kind``.
    """
    mixin: type[ZeroTrainer] = ZeroTrainer
    if issubclass(kind, Seq2SeqTrainer):
        mixin = ZeroSeq2SeqTrainer
    elif any(base.__module__.startswith("trl.") for base in kind.__mro__):
        from zero_engine.hf.trl import TRLTrainer

        mixin = TRLTrainer
    if issubclass(kind, mixin):
        return kind
    if issubclass(mixin, kind):
        return mixin
    return cast(type[ZeroTrainer], type(f"Zero{kind.__name__}", (mixin, kind), {}))
