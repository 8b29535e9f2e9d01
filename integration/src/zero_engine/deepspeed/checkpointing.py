"""``deepspeed.checkpointing``: the same as ``deepspeed.runtime.activation_checkpointing``'s."""

from zero_engine.deepspeed.runtime.activation_checkpointing.checkpointing import (
    checkpoint,
    configure,
    get_cuda_rng_tracker,
    is_configured,
    model_parallel_cuda_manual_seed,
    non_reentrant_checkpoint,
    reset,
)
from zero_engine.script.refusal import refuse_other_names

__all__ = [
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "reset",
]

refuse_other_names(__name__, "runtime.activation_checkpointing.checkpointing")
