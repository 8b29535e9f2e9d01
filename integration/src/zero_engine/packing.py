"""Values beside the model in a sharded checkpoint, as JSON.

Loops, callbacks, schedulers and what a script keeps for itself are numbers, strings, lists,
mappings, and now and then a small tensor (a best score); nothing is pickled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zero_core import CheckpointError

MAX_NUMEL = 65536
"""Elements of the largest tensor."""
_TENSOR = "__tensor__"


def pack(value: Any, where: str, advice: str = "leave it out") -> Any:
    """Return ``value`` with its tensors written out. ``where`` and ``advice`` are for messages.

    Raises:
        CheckpointError: something in it is no JSON, or a tensor of over `MAX_NUMEL` elements.
    """
    if value is None or isinstance(value, bool | int | float | str | Counter):
        return value
    if isinstance(value, Tensor):
        return _pack_tensor(value, where)
    if isinstance(value, list | tuple):
        items = [pack(item, f"{where}[{index}]", advice) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Mapping):
        return {key: pack(item, f"{where}.{key}", advice) for key, item in value.items()}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, and a sharded checkpoint keeps JSON and small "
        f"tensors: {advice}, or give it as numbers, strings, lists and mappings"
    )


def unpack(value: Any) -> Any:
    """Return the value that `pack` was given, with mappings as dicts."""
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
