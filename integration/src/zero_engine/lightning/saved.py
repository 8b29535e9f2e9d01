"""What Lightning keeps in a checkpoint, in the engine's folder of shards.

What stands beside the model is written as JSON; see `zero_engine.packing`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zero_core import CheckpointError, Engine
from zero_core.checkpoint import read_client_state
from zero_core.checkpoint_files import read_buffers, read_weights
from zero_core.evaluation import EvaluationEngine
from zero_engine import packing

__all__ = ["check", "read", "write"]

TAG = "checkpoint"
"""The engine's folder within a checkpoint of Lightning's."""
_ADVICE = "leave it out (save_hyperparameters(ignore=[...]) for an argument)"


def write(engine: Engine, folder: Path, checkpoint: Mapping[str, Any]) -> None:
    """Write the engine's shards, and ``checkpoint`` beside them; every rank must call it."""
    state = {"lightning": packing.pack(checkpoint, "checkpoint", _ADVICE)}
    engine.save_checkpoint(folder, TAG, client_state=state)


def read(engine: Engine, folder: Path) -> dict[str, Any]:
    """Restore what `write` wrote, its values alone if ``engine`` only evaluates; what was beside.

    Every rank must call it.
    """
    if isinstance(engine, EvaluationEngine):
        _read_values(engine, folder)
        client_state = read_client_state(folder, TAG)
    else:
        _, client_state = engine.load_checkpoint(folder, TAG)
    return dict(packing.unpack(client_state["lightning"]))


def check(value: Any, where: str) -> None:
    """Refuse what `write` could not keep; ``where`` it stands is for messages.

    Raises:
        CheckpointError: something in it is no JSON, or a large tensor.
    """
    packing.pack(value, where, _ADVICE)


@torch.no_grad()
def _read_values(engine: Engine, folder: Path) -> None:
    """Parameters one at a time, and buffers; rank 0's count."""
    params = dict(engine.module.named_parameters(remove_duplicate=False))
    for weight in read_weights(folder, TAG):
        param = params.get(weight.names[0])
        if param is None or param.shape != weight.value.shape:
            raise CheckpointError(
                f"{folder} belongs to another model: it has {weight.names[0]} of shape "
                f"{tuple(weight.value.shape)}"
            )
        with engine.gathered(params=[param], modifier_rank=0):
            param.copy_(weight.value)
    for name, value in read_buffers(folder, TAG).items():
        engine.module.get_buffer(name).copy_(value)
