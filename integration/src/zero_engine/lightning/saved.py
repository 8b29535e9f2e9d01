"""Lightning's own part of a checkpoint, in the engine's folder of shards.

What stands beside the model is written as JSON; see `zero_engine.packing`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_core import Engine, ShardedModel
from zero_engine import packing

TAG = "checkpoint"
"""The engine's folder within a checkpoint of Lightning's."""
_ADVICE = "leave it out (save_hyperparameters(ignore=[...]) for an argument)"


def write(engine: ShardedModel, folder: Path, checkpoint: Mapping[str, Any]) -> None:
    """Write the engine's shards, and ``checkpoint`` beside them. Every rank must call it."""
    state = {"lightning": packing.pack(checkpoint, "checkpoint", _ADVICE)}
    assert isinstance(engine, Engine), "Lightning saves in fit(), whose engine trains"
    engine.save_checkpoint(folder, TAG, client_state=state)


def read(engine: ShardedModel, folder: Path) -> dict[str, Any]:
    """Restore what `write` wrote, values alone if ``engine`` only evaluates. Returns the rest.

    Every rank must call it.
    """
    _, client_state = engine.load_checkpoint(folder, TAG)
    return dict(packing.unpack(client_state["lightning"]))


def check(value: Any, where: str) -> None:
    """Refuse values that `write` could not keep. ``where`` is for messages.

    Raises:
        CheckpointError: something in it is no JSON, or a large tensor.
    """
    packing.pack(value, where, _ADVICE)
