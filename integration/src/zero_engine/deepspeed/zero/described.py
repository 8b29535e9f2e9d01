"""Attributes by which scripts know a sharded parameter: ``ds_id``, ``ds_status``, ``ds_tensor``.

While an engine of stage 3 has a parameter, its class is `ShardedParameter`: status and shard are
looked up in the engine when they are asked for. A parameter of another class than torch's keeps it,
as its own operators dispatch on that; that class has descriptors of these names meanwhile. Before,
``ds_status`` is what `GatheredParameters` says. DeepSpeed's sharded parameter has no elements. Here
it keeps its shape, and ``ds_shape`` and ``ds_numel`` say the same as ``shape`` and ``numel()``.

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

import enum
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import _CheckpointFrame

from zero_core import ShardedModel, engine_of
from zero_core.adapters import EngineParameter, derive, is_refused, own_class, use_class

SANITY_CHECKS = "ds_enable_sanity_checks"
"""Attribute that has `GatheredParameters` look for edits that would be lost."""
ASKED = ("ds_status", "ds_tensor", "partition_numel")
"""Attributes of `ShardedParameter`, which only the engine knows."""

_ids = itertools.count()


class ZeroParamType(enum.Enum):
    """State of a parameter's memory, under DeepSpeed's names."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    """Whether a parameter holds its value on this rank."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ShardedParameter(EngineParameter):
    """Class of a parameter while an engine of stage 3 has it."""

    @property
    def ds_status(self) -> ZeroParamStatus:
        """AVAILABLE in its unit's forward and backward and within `GatheredParameters`."""
        is_here = _engine(self, "ds_status").holds_value(self)
        return ZeroParamStatus.AVAILABLE if is_here else ZeroParamStatus.NOT_AVAILABLE

    @property
    def ds_tensor(self) -> Tensor:
        """This rank's elements, 1-D, in the parameter's dtype, not to be changed. May be empty."""
        return _engine(self, "ds_tensor").own_part(self).detach()

    def partition_numel(self) -> int:
        """Return the number of this rank's elements. Lightning's summary of a model asks for it."""
        return self.ds_tensor.numel()


def is_zero_param(parameter: object) -> bool:
    """Whether it was made within `Init`, or belongs to an engine of stage 3."""
    return isinstance(parameter, nn.Parameter) and "ds_id" in vars(parameter)


def describe(
    params: Iterable[nn.Parameter],
    *,
    has_checks: bool | None = None,
    secondary: dist.ProcessGroup | None = None,
) -> None:
    """Give sharded ``params`` the attributes by which scripts know them (``ds_id``, ...).

    ``has_checks`` is `SANITY_CHECKS`; None leaves it as it is. ``secondary`` are the ranks that
    share hpZ's secondary shards.
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
    """Describe the parameters of ``engine``, of stage 3, unpacked ones too, until it ends."""
    params = list(engine.module.parameters())
    describe(params, has_checks=engine.config.zero_optimization.enable_sanity_checks)
    engine.remove_at_end(
        # Torch's own class, or one that the engine has given, may be derived from.
        _shard(param)
        if (own := own_class(param)) is nn.Parameter or issubclass(own, EngineParameter)
        else _OwnClass(param)
        for param in params
    )
    engine.remove_at_end([_Saved(params)])


class AtEnd:
    """A clean-up that an engine runs at its end."""

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo = undo

    def remove(self) -> None:
        self._undo()


def _shard(param: nn.Parameter) -> AtEnd:
    """Make the class of ``param`` a `ShardedParameter`."""
    before = own_class(param)
    use_class([param], derive(ShardedParameter, before))
    return AtEnd(lambda: use_class([param], before))


class _OwnClass:
    """A parameter of another class than torch's, which has the names `ASKED` until `remove`."""

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
    """One of the names `ASKED`, on a class that is not ours. An instance's own attribute counts."""

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
"""The attributes by which scripts know a sharded parameter."""

_engines: list[_Saved] = []
_get_inputs: Any = vars(_CheckpointFrame).get("get_inputs")


class _Saved:
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


def _saved_tensors(context: BackwardCFunction) -> Any:
    return _described(super(BackwardCFunction, context).saved_tensors)


def _inputs(frame: _CheckpointFrame) -> Any:
    return _described(_get_inputs(frame))


def _described(unpacked: Any) -> Any:
    """Return ``unpacked``, in which gathered values have their parameters' attributes."""
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
