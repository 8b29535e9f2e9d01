"""TRL's trainers (1.16) on the engine: `TRLTrainer`, which `zero_engine.hf.zero_trainer` uses.

[Note: TRL's readers of weights]
TRL reads weights outside of the trained model's forward. With DeepSpeed it gathers them itself:

generation                  All ranks generate equally many tokens: `ZeroTrainer`.
reference, reward, teacher  `ZeroAccelerator.prepare_model` builds an engine that only evaluates.
a teacher's head            DistillationTrainer's loss reads it: `TRLTrainer.compute_loss`.
precomputed log-probs       They are computed before training: `TRLTrainer.compute_ref_log_probs`.
a moving reference          A callback writes to it, or to a teacher: `sync_gathered`.
vLLM                        `EngineBackend` gathers what is sent to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from accelerate.utils import is_peft_model  # type: ignore[import-untyped]
from torch import nn
from transformers import TrainerCallback
from trl.distributed import DistributedBackend
from trl.trainer.callbacks import SyncRefModelCallback

from zero_core import ShardedModel, engine_of
from zero_engine.hf.trainer import ZeroAccelerator, ZeroTrainer


def _engine_of(model: nn.Module) -> ShardedModel:
    engine = engine_of(next(model.parameters()))
    assert engine is not None, "the Accelerator or ZeroTrainer has built it"
    return engine


def sync_gathered(model: nn.Module, target_model: nn.Module, alpha: float) -> None:
    """Move ``target_model`` towards ``model`` as TRL does, while both hold their whole weights."""
    with _engine_of(model).gathered(), _engine_of(target_model).gathered(modifier_rank=0):
        SyncRefModelCallback.sync_target_model(model, target_model, alpha)


class EngineBackend(DistributedBackend):  # type: ignore[misc]
    """TRL's distributed backend, for parameters that the engine gathers."""

    def __init__(self, accelerator: ZeroAccelerator) -> None:
        super().__init__(accelerator)
        self._accelerator = accelerator

    def gather_params(self, params: Iterable[nn.Parameter]) -> AbstractContextManager[object]:
        """Gather ``params``. Every rank must enter the context with the same ones.

        TRL merges adapters into the weights within the context and takes them out again, which
        changes the weights by rounding errors. All ranks keep rank 0's values.
        """
        engine = self._accelerator.engine
        assert engine is not None, "TRL sends weights of a model that generates"
        modifier_rank = 0 if is_peft_model(engine.module) else None
        return engine.gathered(params=params, modifier_rank=modifier_rank)


class TRLTrainer(ZeroTrainer):
    """Mixin for TRL's trainers: see [Note: TRL's readers of weights]."""

    def _start_engine(self, *, is_training: bool) -> None:
        super()._start_engine(is_training=is_training)
        if (generation := getattr(self, "vllm_generation", None)) is not None:
            generation._dist = EngineBackend(self.accelerator)

    def add_callback(self, callback: type[TrainerCallback] | TrainerCallback) -> None:
        if isinstance(callback, SyncRefModelCallback):
            callback.sync_target_model = sync_gathered
        super().add_callback(callback)

    def compute_ref_log_probs(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """Compute a batch's reference log-probabilities. Builds the engine if there is none yet."""
        if model is self.model:
            self._wrap_model(model, training=False)
        return super().compute_ref_log_probs(model, inputs)  # type: ignore[misc]

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss as TRL does, while the output embeddings of a teacher are gathered."""
        teacher = getattr(self, "teacher_model", None)
        if teacher is None or teacher is self.model:
            return super().compute_loss(*args, **kwargs)
        head = (teacher.get_output_embeddings() or teacher).parameters()
        with _engine_of(teacher).gathered(params=head):
            return super().compute_loss(*args, **kwargs)
