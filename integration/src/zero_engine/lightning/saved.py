"""What Lightning keeps in a checkpoint, in the engine's folder of shards.

What stands beside the model is written as JSON. Loops, callbacks, schedulers and hyperparameters
are numbers, strings, lists, mappings, and now and then a small tensor (a best score); nothing is
pickled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_core import CheckpointError, Engine
from zero_core.checkpoint import read_client_state
from zero_core.checkpoint_files import read_buffers, read_weights
from zero_core.evaluation import EvaluationEngine

__all__ = ["pack", "read", "unpack", "write"]

TAG = "checkpoint"
"""The engine's folder within a checkpoint of Lightning's."""

MAX_NUMEL = 65536
_TENSOR = "__tensor__"


def write(engine: Engine, folder: Path, checkpoint: Mapping[str, Any]) -> None:
    """Write the engine's shards, and ``checkpoint`` beside them; every rank must call it."""
    state = {"lightning": pack(checkpoint, "checkpoint")}
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
    return dict(unpack(client_state["lightning"]))


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


def pack(value: Any, where: str) -> Any:
    """``value`` with its tensors written out; ``where`` it stands is for messages.

    Raises:
        CheckpointError: something in it is no JSON, or a tensor of over `MAX_NUMEL` elements.
    """
    if value is None or isinstance(value, bool | int | float | str | Counter):
        return value
    if isinstance(value, Tensor):
        return _pack_tensor(value, where)
    if isinstance(value, list | tuple):
        items = [pack(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Mapping):
        return {key: pack(item, f"{where}.{key}") for key, item in value.items()}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, and a sharded checkpoint keeps JSON and small "
        "tensors: leave it out (save_hyperparameters(ignore=[...]) for an argument), or give it "
        "as numbers, strings, lists and mappings"
    )


def unpack(value: Any) -> Any:
    """What `pack` was given; mappings come back as dicts."""
    if isinstance(value, list | tuple):
        return type(value)(unpack(item) for item in value)
    if not isinstance(value, dict) or isinstance(value, Counter):
        return value
    if _TENSOR in value:
        dtype = getattr(torch, value[_TENSOR])
        return torch.tensor(value["values"], dtype=dtype).reshape(value["shape"])
    return {key: unpack(item) for key, item in value.items()}


def _pack_tensor(tensor: Tensor, where: str) -> dict[str, Any]:
    if tensor.numel() > MAX_NUMEL or tensor.is_complex() or tensor.is_quantized:
        raise CheckpointError(
            f"{where} is a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}: beside the "
            f"model, a sharded checkpoint keeps real tensors of up to {MAX_NUMEL} elements. Make "
            "it a buffer of the module, or save it to a file of its own"
        )
    return {
        _TENSOR: str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "values": tensor.detach().reshape(-1).tolist(),
    }
