"""DeepSpeed's attributes of a parameter, where its class cannot have them.

[Note: parameters of a class of their own]
A quantizer's parameter keeps its class, as operators dispatch on it. What an engine of stage 3 is
asked for by name (`ASKED`) is answered for it by descriptors of ``torch.Tensor``, too.

[Note: parameters in an autograd.Function]
DeepSpeed's parameter is saved as the object it is, so the backward of an ``autograd.Function``
finds ``ds_status`` and the like on ``ctx.saved_tensors``. Here a saved parameter is unpacked as a
view of its gathered unit: torch makes a new tensor of whatever a hook returns, and drops its
attributes. So the names are descriptors of ``torch.Tensor``, from the first engine of stage 3 on.
They answer within a backward alone, for tensors with the address and shape of one of an engine's
parameters. Elsewhere there is no such attribute. One that is set on a tensor comes first.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

from zero_core import ShardedModel
from zero_core._torch import is_in_backward
from zero_engine.deepspeed.zero.described import ShardedParameter, ZeroParamStatus, is_zero_param

ASKED = ("ds_status", "ds_tensor", "partition_numel")
"""Those of `ShardedParameter`, which only the engine knows."""
NAMES = (
    *("ds_active_sub_modules", "ds_id", "ds_numel", "ds_param_type", "ds_persist", "ds_shape"),
    *ASKED,
)
"""The attributes by which scripts know a sharded parameter."""

_engines: weakref.WeakSet[ShardedModel] = weakref.WeakSet()


def serve_saved(engine: ShardedModel) -> None:
    """Give what a backward of ``engine`` unpacks of its parameters their ``ds_*`` attributes."""
    _engines.add(engine)
    for name in NAMES:
        if name not in vars(Tensor):
            setattr(Tensor, name, _OfSaved(name))


class _OfSaved:
    """One attribute: see the note at the top of this file."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, tensor: Tensor | None, owner: type[Tensor]) -> Any:
        if tensor is None:
            return self
        if self._name in ASKED and is_zero_param(tensor) and "ds_status" not in vars(tensor):
            return vars(ShardedParameter)[self._name].__get__(tensor)
        param = _param_behind(tensor)
        if param is None:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")
        return (
            ZeroParamStatus.AVAILABLE if self._name == "ds_status" else getattr(param, self._name)
        )


def _param_behind(tensor: Tensor) -> nn.Parameter | None:
    """Return the parameter whose gathered values ``tensor`` is, within a backward."""
    if isinstance(tensor, nn.Parameter) or not is_in_backward() or not tensor.numel():
        return None
    key = (tensor.data_ptr(), tensor.shape)
    params = (param for engine in _engines for param in engine.module.parameters())
    return next((param for param in params if (param.data_ptr(), param.shape) == key), None)
