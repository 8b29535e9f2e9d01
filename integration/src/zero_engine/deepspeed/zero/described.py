"""Attributes by which scripts recognise a sharded parameter (``ds_id``, ``ds_status``, ...).

While a stage-3 engine owns a parameter, its class is `ShardedParameter`, whose properties ask the
engine. A parameter of a subclass keeps that class, because operators dispatch on it, and the class
gets descriptors of these names. Unlike DeepSpeed's, a sharded parameter keeps its shape.

[Note: parameters in an autograd.Function]
In DeepSpeed, ``ctx.saved_tensors`` of an ``autograd.Function`` holds the parameter objects with
these attributes. Here a saved parameter is unpacked as a new tensor, a view of its gathered unit.
While there is a stage-3 engine, ``ctx.saved_tensors`` is therefore a property: tensors with the
address and shape of a parameter get that parameter's attributes. The class ``torch.Tensor`` does
not get the attributes, because torch.compile would see them on every tensor.

Non-reentrant `torch.utils.checkpoint` keeps the arguments of the recomputed function, which its
frame's ``get_inputs`` returns. That method is replaced in the same way. In torch releases without
``get_inputs``, checkpoints use an ``autograd.Function``, which the property covers.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import _CheckpointFrame

from zero_core import ShardedModel, engine_of
from zero_core.adapters import EngineParameter, derive, is_refused, own_class, use_class

SANITY_CHECKS = "ds_enable_sanity_checks"
"""Attribute that makes `GatheredParameters` refuse edits that would be lost."""
ASKED = ("ds_status", "ds_tensor", "partition_numel")
"""Attributes of `ShardedParameter` whose values the engine computes."""

_ids = itertools.count()


class ZeroParamType(enum.Enum):
    """Kind of a parameter's memory, under DeepSpeed's names."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    """Whether a parameter holds its value on this rank."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ShardedParameter(EngineParameter):
    """Class of a parameter while a stage-3 engine owns it."""

    @property
    def ds_status(self) -> ZeroParamStatus:
        """AVAILABLE while the parameter holds its value, as in its unit's forward."""
        is_here = _engine(self, "ds_status").holds_value(self)
        return ZeroParamStatus.AVAILABLE if is_here else ZeroParamStatus.NOT_AVAILABLE

    @property
    def ds_tensor(self) -> Tensor:
        """This rank's elements, 1-D, in the parameter's dtype, read only. May be empty."""
        return _engine(self, "ds_tensor").own_part(self).detach()

    def partition_numel(self) -> int:
        return self.ds_tensor.numel()


def is_zero_param(parameter: object) -> bool:
    """Whether ``parameter`` was made within `Init` or belongs to a stage-3 engine."""
    return isinstance(parameter, nn.Parameter) and "ds_id" in vars(parameter)


def describe(
    params: Iterable[nn.Parameter],
    *,
    has_checks: bool | None = None,
    secondary: dist.ProcessGroup | None = None,
) -> None:
    """Set the attributes by which scripts recognise sharded ``params`` (``ds_id``, ...).

    ``has_checks`` is the value of `SANITY_CHECKS`; None does not set it. ``secondary`` is the group
    of ranks that share hpZ's secondary shards.
    """
    for param in params:
        if not is_zero_param(param):
            vars(param).update(
                ds_id=next(_ids),
                ds_status=ZeroParamStatus.NOT_AVAILABLE,
                ds_param_type=ZeroParamType.PARTITIONED,
                ds_persist=False,
                ds_active_sub_modules=set(),
                ds_zero_param_process_group=secondary,
            )
        vars(param).update(ds_shape=param.shape, ds_numel=param.numel())
        if has_checks is not None:
            vars(param)[SANITY_CHECKS] = has_checks


def describe_engine(engine: ShardedModel) -> None:
    """Set `NAMES` on a stage-3 engine's parameters, and on saved tensors that are unpacked."""
    params = list(engine.module.parameters())
    describe(params, has_checks=engine.config.zero_optimization.enable_sanity_checks)
    for param in params:
        own = own_class(param)
        if own is nn.Parameter or issubclass(own, EngineParameter):
            use_class([param], derive(ShardedParameter, own))
            engine.remove_at_end([AtEnd(partial(use_class, [param], own))])
        else:  # a subclass that a user wrote stays the parameter's class
            engine.remove_at_end([_OwnClass(param)])
    engine.remove_at_end([_Saved(params)])


class AtEnd:
    """Clean-up function in the form that an engine's ``remove_at_end`` takes."""

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo = undo

    def remove(self) -> None:
        self._undo()


class _OwnClass:
    """Descriptors of the names `ASKED`, set on a parameter's user-written class."""

    _num_params: ClassVar[Counter[type[nn.Parameter]]] = Counter()

    def __init__(self, param: nn.Parameter) -> None:
        self._class = own_class(param)
        self._attributes = vars(param)
        self._status = self._attributes.pop("ds_status")
        if not self._num_params[self._class]:
            for name in ASKED:
                setattr(self._class, name, _Asked(name))
        self._num_params[self._class] += 1

    def remove(self) -> None:
        self._attributes["ds_status"] = self._status
        self._num_params[self._class] -= 1
        if not self._num_params[self._class]:
            for name in ASKED:
                delattr(self._class, name)


class _Asked:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, param: nn.Parameter | None, owner: type[nn.Parameter]) -> Any:
        return self if param is None else vars(ShardedParameter)[self._name].__get__(param)


def _engine(param: nn.Parameter, name: str) -> ShardedModel:
    engine = engine_of(param)
    if engine is None:
        raise AttributeError(f"the parameter belongs to no engine and has no {name!r}")
    return engine


NAMES = (
    *("ds_active_sub_modules", "ds_id", "ds_numel", "ds_param_type", "ds_persist", "ds_shape"),
    *ASKED,
)
"""Attributes that `_described` copies from a parameter to its gathered value."""

_engines: list[_Saved] = []
_get_inputs: Any = vars(_CheckpointFrame).get("get_inputs")


class _Saved:
    """Parameters of one engine by shape. Patches torch's unpacking while any such object exists."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for param in params:
            if param.numel():
                self.by_shape.setdefault(param.shape, []).append(param)
        if not _engines:
            BackwardCFunction.saved_tensors = property(  # type: ignore[assignment]
                lambda context: _described(super(BackwardCFunction, context).saved_tensors)
            )
            if _get_inputs is not None:
                _CheckpointFrame.get_inputs = (  # type: ignore[method-assign]
                    lambda frame: _described(_get_inputs(frame))
                )
        _engines.append(self)

    def remove(self) -> None:
        _engines.remove(self)
        if not _engines:
            del BackwardCFunction.saved_tensors
            if _get_inputs is not None:
                _CheckpointFrame.get_inputs = _get_inputs  # type: ignore[method-assign]


def _described(unpacked: Any) -> Any:
    for tensor in unpacked:
        if type(tensor) is not Tensor:
            continue
        alike = [param for engine in _engines for param in engine.by_shape.get(tensor.shape, ())]
        here = (param for param in alike if not is_refused(param))
        param = next((param for param in here if param.data_ptr() == tensor.data_ptr()), None)
        if param is not None:
            vars(tensor).update({name: getattr(param, name) for name in NAMES})
            vars(tensor)["ds_status"] = ZeroParamStatus.AVAILABLE
    return unpacked
