"""JSON form of client and scheduler state, restored exactly.

What stands beside a model is numbers, strings, lists, mappings, and now and then a small tensor
(a best score). Nothing is pickled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zero_core.errors import CheckpointCorruptError, CheckpointError

MAX_NUMEL = 65536
"""Elements of the largest tensor."""
_TENSOR = "__tensor__"


def encode(value: Any, where: str, advice: str = "leave it out") -> Any:
    """Return ``value`` as JSON. `decode` restores it, mappings as dicts, tensors on the CPU."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        is_dense = value.layout is torch.strided and not value.is_quantized
        if value.numel() > MAX_NUMEL or value.is_complex() or not is_dense:
            raise CheckpointError(
                f"{where} is a tensor of shape {tuple(value.shape)}, {value.dtype} and "
                f"{value.layout}: beside the model, a checkpoint keeps real, dense tensors of up "
                f"to {MAX_NUMEL} elements. Make it a buffer of the module, or save it to a file of "
                "its own"
            )
        dtype = str(value.dtype).removeprefix("torch.")
        return {_TENSOR: [dtype, list(value.shape), value.detach().reshape(-1).tolist()]}
    if isinstance(value, list | tuple):
        rows = [encode(v, f"{where}[{index}]", advice) for index, v in enumerate(value)]
        return rows if isinstance(value, list) else {"__tuple__": rows}
    if isinstance(value, Mapping):
        items = [
            [encode(k, where, advice), encode(v, f"{where}.{k}", advice)] for k, v in value.items()
        ]
        if isinstance(value, Counter):  # MultiStepLR keeps its milestones in one
            return {"__counter__": items}
        if all(isinstance(k, str) and not k.startswith("__") for k in value):
            return dict(items)
        return {"__mapping__": items}
    raise CheckpointError(
        f"{where} is a {type(value).__name__} ({value!r:.60}), and a checkpoint keeps JSON and "
        f"small tensors: {advice}, or give it as numbers, strings, lists and mappings"
    )


def decode(value: Any) -> Any:
    """Restore the argument of `encode`."""
    try:
        return _decode(value)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError) as error:
        raise CheckpointCorruptError(
            f"a value beside the model is not what was written: {error!r:.300}"
        ) from error


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__tuple__"}:
        return tuple(_decode(v) for v in value["__tuple__"])
    if value.keys() == {"__counter__"}:
        return Counter({_decode(k): _decode(v) for k, v in value["__counter__"]})
    if value.keys() == {"__mapping__"}:
        return {_decode(k): _decode(v) for k, v in value["__mapping__"]}
    if value.keys() == {_TENSOR}:
        dtype, shape, values = value[_TENSOR]
        if len(values) > MAX_NUMEL or math.prod(shape) != len(values) or min(shape, default=0) < 0:
            raise ValueError(f"{len(values)} values of a tensor of shape {shape}")
        return torch.tensor(values, dtype=getattr(torch, dtype)).reshape(shape)
    return {k: _decode(v) for k, v in value.items()}
