"""``deepspeed.checkpoint.utils``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zero_engine.script.refusal import refuse_other_names

__all__ = ["clone_tensors_for_torch_save"]

_CPU = torch.device("cpu")


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = _CPU) -> Any:
    """``item`` with every tensor in it, in lists, tuples and dicts too, copied to ``device``.

    Parameters are slices of large buffers here; torch.save writes a whole buffer for a slice.
    """
    if isinstance(item, Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, list):
        return [clone_tensors_for_torch_save(v, device) for v in item]
    if isinstance(item, tuple):
        return tuple(clone_tensors_for_torch_save(v, device) for v in item)
    if isinstance(item, dict):
        return type(item)({k: clone_tensors_for_torch_save(v, device) for k, v in item.items()})
    return item


refuse_other_names(__name__)
