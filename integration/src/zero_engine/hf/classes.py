"""Classes of Trainers whose models the engine trains, made from any class of Trainer."""

from __future__ import annotations

import functools
from typing import cast

from transformers import Seq2SeqTrainer, Trainer

from zero_engine.hf.trainer import ZeroSeq2SeqTrainer, ZeroTrainer


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
