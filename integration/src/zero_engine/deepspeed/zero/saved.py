"""DeepSpeed's attributes of parameters that a backward unpacks.

[Note: parameters in an autograd.Function]
DeepSpeed's parameter is saved as the object it is, so the backward of an ``autograd.Function``
finds ``ds_status`` and the like on ``ctx.saved_tensors``. Here a saved parameter is unpacked as a
view of its gathered unit: torch makes a new tensor of whatever a hook returns, and drops its
attributes. So from the first engine of stage 3 to the end of the last one, ``ctx.saved_tensors`` is
a property of the class of these contexts. It gives tensors that have the address and the shape of a
parameter the parameter's attributes. ``torch.Tensor`` has no such names: torch.compile takes what
that class has for an attribute of every tensor.

`torch.utils.checkpoint` without reentrance saves the arguments of the function that it calls again.
Their frame's ``get_inputs`` gives them back, and so is replaced as long. Releases of torch without
it save them by an ``autograd.Function``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import _CheckpointFrame

from zero_core import ShardedModel
from zero_core.adapters import is_refused
from zero_engine.deepspeed.zero.described import ASKED, ZeroParamStatus

NAMES = (
    *("ds_active_sub_modules", "ds_id", "ds_numel", "ds_param_type", "ds_persist", "ds_shape"),
    *ASKED,
)
"""The attributes by which scripts know a sharded parameter."""

_engines: list[_Served] = []
_get_inputs: Any = vars(_CheckpointFrame).get("get_inputs")


def serve_saved(engine: ShardedModel) -> None:
    """Give the parameters of ``engine`` that a backward unpacks their attributes, to its end."""
    engine.remove_at_end([_Served(engine.module.parameters())])


class _Served:
    """The parameters of one engine, by shape, until `remove`."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for param in params:
            if param.numel():
                self.by_shape.setdefault(param.shape, []).append(param)
        if not _engines:
            BackwardCFunction.saved_tensors = property(_saved_tensors)  # type: ignore[assignment]
            if _get_inputs is not None:
                _CheckpointFrame.get_inputs = _inputs  # type: ignore[method-assign]
        _engines.append(self)

    def remove(self) -> None:
        _engines.remove(self)
        if not _engines:
            del BackwardCFunction.saved_tensors
            if _get_inputs is not None:
                _CheckpointFrame.get_inputs = _get_inputs  # type: ignore[method-assign]


def _saved_tensors(context: BackwardCFunction) -> tuple[Any, ...]:
    saved: tuple[Any, ...] = super(BackwardCFunction, context).saved_tensors
    _describe(saved)
    return saved


def _inputs(frame: _CheckpointFrame) -> list[Any]:
    inputs: list[Any] = _get_inputs(frame)
    _describe(inputs)
    return inputs


def _describe(unpacked: Iterable[Any]) -> None:
    """Give tensors that are parameters' gathered values the parameters' attributes."""
    for tensor in unpacked:
        if type(tensor) is not Tensor:
            continue
        alike = [param for engine in _engines for param in engine.by_shape.get(tensor.shape, ())]
        here = (param for param in alike if not is_refused(param))
        param = next((param for param in here if param.data_ptr() == tensor.data_ptr()), None)
        if param is not None:
            vars(tensor).update({name: getattr(param, name) for name in NAMES})
            vars(tensor)["ds_status"] = ZeroParamStatus.AVAILABLE
