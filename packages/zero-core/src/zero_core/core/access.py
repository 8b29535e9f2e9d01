"""Reads and writes of parameters between gathers. This file alone assigns their classes.

[Note: access]
A parameter tells the truth to whoever looks: the current value, or an error at that place.

open      The parameter holds its value. It has its own class, and reads cost nothing. Where a
          master weight is other memory, reads of ``data`` are noted: see `Edits`.
deferred  The value is on its way, as after a step at stages 1 and 2. The first read waits for it.
refused   The value is not here, as between two uses at stage 3. A read raises, and names the cure.

1. A read starts no collective: a line in the log of one rank would wait for the others for ever.
   What is to be waited for is launched by `UnitSet.publish`, on all ranks in one order, and never
   within a backward.
2. A deferred or refused parameter is of a subclass of its class, whose ``__torch_function__`` torch
   calls before any operation on it. Objects, hooks and gradients do not change.
3. Names, shapes, hooks and gradients need no value (`NEEDS_NO_VALUE`): they never wait or raise.
4. Any thread may read. The wait is the host's, under the lock of whoever holds the values.

What no class can see is an alias that outlives a step, of ``param.data`` or by DLPack: see
docs/after-build.md.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import GetSetDescriptorType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from zero_core._torch import allow_foreach, pytree

_READING_PROPERTIES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_PROPERTIES = {
    name: found
    for name, found in vars(torch._C.TensorBase).items()
    if isinstance(found, GetSetDescriptorType)
}
NEEDS_NO_VALUE = frozenset(
    {
        *(p.__get__ for name, p in _PROPERTIES.items() if name not in _READING_PROPERTIES),
        *(_PROPERTIES[name].__set__ for name in ("grad", "requires_grad", "_grad")),
        *(_PROPERTIES["grad"].__delete__, Tensor.__len__, Tensor.__hash__, Tensor.stride),
        *(Tensor.dense_dim, Tensor.dim, Tensor.dim_order, Tensor.element_size, Tensor.get_device),
        *(Tensor.is_complex, Tensor.is_conj, Tensor.is_contiguous, Tensor.is_distributed),
        *(Tensor.is_floating_point, Tensor.is_inference, Tensor.is_neg, Tensor.is_pinned),
        *(Tensor.is_same_size, Tensor.is_shared, Tensor.is_signed, Tensor.ndimension),
        *(Tensor.nelement, Tensor.numel, Tensor.size, Tensor.sparse_dim, Tensor.storage_offset),
        *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad),
        *(Tensor.requires_grad_, Tensor.__dlpack_device__),
        *(torch.is_complex, torch.is_floating_point, torch.is_signed, torch.numel),
        *(torch.is_same_size, torch.result_type, torch.autograd.grad),
        torch._has_compatible_shallow_copy_type,  # `nn.Module.to`
        *(torch.empty_like, torch.full_like, torch.ones_like, torch.rand_like, torch.randint_like),
        *(torch.randn_like, torch.zeros_like, Tensor.new_empty, Tensor.new_empty_strided),
        *(Tensor.new_full, Tensor.new_ones, Tensor.new_zeros),
    }
)
"""Functions of a parameter that read and write none of its values. A test compares them with all
functions of a tensor that torch's own list has."""
_CONVERSIONS = frozenset(
    {
        *(Tensor.to, Tensor.type, Tensor.cpu, Tensor.cuda, Tensor.xpu, Tensor.float, Tensor.half),
        *(Tensor.bfloat16, Tensor.double),
    }
)
"""They return the parameter itself, or the name of a type, where there is nothing to convert."""
_SET_DATA = _PROPERTIES["data"].__set__


class Cures(NamedTuple):
    """Calls that let a program use a sharded parameter, as its interface names them in errors.

    Attributes:
        read: gathers parameters.
        write: gathers parameters that one rank is to change.
        declare: has the forward of another module gather a parameter.
    """

    read: str = "engine.gathered()"
    write: str = "engine.gathered(modifier_rank=...)"
    declare: str = "make it or its module a part of that one before build()"


class ValueHolder(Protocol):
    """Holds the values of parameters: `zero_core.core.params.FlatParams`."""

    def await_values(self, param: nn.Parameter) -> None:
        """Wait for the value of ``param``, which is deferred, and open it."""

    @property
    def is_ended(self) -> bool:
        """Whether the engine has ended, so that parameters may be given other memory."""

    def refusal(self, param: nn.Parameter, *, is_write: bool) -> str:
        """Return why ``param``, which is refused, cannot be read or written, and the cure."""


class _Closed:
    """Base of the classes of parameters that are not open."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in NEEDS_NO_VALUE or (func == _SET_DATA and args[0] is args[1]):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[misc]
        if func in _CONVERSIONS:
            found = super().__torch_function__(func, types, args, kwargs)  # type: ignore[misc]
            if found is args[0] or not isinstance(found, Tensor):
                return found
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, _Closed):
                name = getattr(func, "__name__", "")  # foreign: torch's functions
                writes = func == _SET_DATA or (name.endswith("_") and not name.endswith("__"))
                leaf._open(func, is_write=writes and leaf is args[0])
        return func(*args, **kwargs)

    def _open(self, func: Any, *, is_write: bool) -> None:
        """Open the parameter for ``func``, or raise."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._open(copy.deepcopy, is_write=False)
        return copy.deepcopy(self, memo)  # by its own class


class _Deferred(_Closed):
    """Base of the classes of deferred parameters."""

    __slots__ = ()

    def _open(self: Any, func: Any, *, is_write: bool) -> None:
        _holder_of(self).await_values(self)


class _Refused(_Closed):
    """Base of the classes of refused parameters."""

    __slots__ = ()

    def _open(self: Any, func: Any, *, is_write: bool) -> None:
        if func == _SET_DATA and _has_no_engine(self):
            open_all([self])
            return
        raise RuntimeError(_holder_of(self).refusal(self, is_write=is_write))

    def __repr__(self: Any, *, tensor_contents: Any = None) -> str:
        """Describe the parameter without its values, for debuggers and logs."""
        return f"Parameter(without values here, {tuple(self.shape)}, {self.dtype})"


# One pass in C, as it runs for every parameter of every gather.
_set_class = vars(object)["__class__"].__set__


class _OwnClasses(dict[type, type]):
    """The original class of each class made here. Any other class is its own original."""

    def __missing__(self, found: type) -> type:
        return found


_own_classes = _OwnClasses()


class _Classes(dict[type, type]):
    """Subclasses of a base and a parameter's own class, by that class or another one of its."""

    def __init__(self, base: type) -> None:
        super().__init__()
        self._base = base
        self.made: set[type] = set()

    def __missing__(self, found: type) -> type:
        own = _own_classes[found]
        if own is not found:
            self[found] = made = self[own]
        else:
            self[own] = made = type(own.__name__, (self._base, own), {"__module__": __name__})
            _own_classes[made] = own
            self.made.add(made)
            allow_foreach(made)
        return made


_DEFERRED, _REFUSED = _Classes(_Deferred), _Classes(_Refused)

_get_data = _PROPERTIES["data"].__get__
_aliased: set[int] = set()  # ids of watched parameters whose data was read


class _Watched:
    """Base of the classes of open parameters whose ``data`` is noted when it is read or set."""

    __slots__ = ()

    @property
    def data(self) -> Any:
        """The memory of the parameter, which the reader may write to."""
        _aliased.add(id(self))
        return _get_data(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        _aliased.add(id(self))
        _SET_DATA(self, value)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        watched = type(self)
        self.__class__ = watched.__mro__[watched.__mro__.index(_Watched) + 1]
        try:
            return copy.deepcopy(self, memo)
        finally:
            self.__class__ = watched


_derived: dict[tuple[type, type], type] = {}


def derive(base: type, own: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the class with bases ``base`` and ``own``. Torch's optimizers take it as ``own``."""
    if (base, own) not in _derived:
        _derived[base, own] = type(own.__name__, (base, own), {"__module__": __name__})
        allow_foreach(_derived[base, own])
    return _derived[base, own]


def open_all(params: Sequence[nn.Parameter]) -> None:
    """Give parameters their own classes: they hold their values."""
    list(map(_set_class, params, map(_own_classes.__getitem__, map(type, params))))


def defer(params: Sequence[nn.Parameter]) -> None:
    """Have the first read of each parameter wait."""
    list(map(_set_class, params, map(_DEFERRED.__getitem__, map(type, params))))


def refuse(params: Sequence[nn.Parameter]) -> None:
    """Have reads of parameters raise."""
    list(map(_set_class, params, map(_REFUSED.__getitem__, map(type, params))))


def is_refused(param: Tensor) -> bool:
    """Whether a read of ``param`` raises."""
    return isinstance(param, _Refused)


def are_refused(params: Sequence[nn.Parameter]) -> bool:
    """Whether reads of all ``params`` raise."""
    return all(map(_REFUSED.made.__contains__, map(type, params)))


def use_class(params: Iterable[nn.Parameter], own: type[nn.Parameter]) -> None:
    """Give parameters the class ``own``, for whenever they are open from now on."""
    for param in params:
        if isinstance(param, _Closed):
            param.__class__ = (_REFUSED if is_refused(param) else _DEFERRED)[own]
        else:
            param.__class__ = own


def set_class(param: Tensor, found: type[Tensor]) -> None:
    """Give a tensor the class ``found``, which it had before."""
    if type(param) is not found:
        param.__class__ = found


def own_class(param: nn.Parameter) -> type[nn.Parameter]:
    """Return the class that ``param`` has while it is open."""
    return _own_classes[type(param)]


@contextmanager
def opened(params: Iterable[nn.Parameter | None]) -> Iterator[None]:
    """Let the engine itself use parameters within, whatever they hold."""
    before = [(param, type(param)) for param in params if param is not None]
    open_all([param for param, _ in before])
    try:
        yield
    finally:
        for param, found in before:
            param.__class__ = found


def watch(params: Iterable[nn.Parameter]) -> None:
    """Note reads of ``data`` for `take_aliased`, until `stop_watching`."""
    for param in params:
        use_class([param], derive(_Watched, own_class(param)))


def stop_watching(params: Iterable[nn.Parameter]) -> None:
    """Give parameters the class that they had before `watch`."""
    for param in params:
        own = own_class(param)
        if issubclass(own, _Watched):
            use_class([param], own.__mro__[own.__mro__.index(_Watched) + 1])


def take_aliased(params: Sequence[Tensor]) -> list[int]:
    """Return the positions of ``params`` whose ``data`` was read since the last call for them."""
    if not _aliased:
        return []
    found = [position for position, param in enumerate(params) if id(param) in _aliased]
    _aliased.difference_update(id(params[position]) for position in found)
    return found


_holders: dict[int, weakref.ref[ValueHolder]] = {}  # by id of the parameter


def register(holder: ValueHolder, params: Iterable[nn.Parameter]) -> None:
    """Have reads of ``params`` ask ``holder``, which is held weakly."""
    numbers = [id(param) for param in params]
    reference = weakref.ref(holder, partial(_forget, numbers))
    _holders.update(dict.fromkeys(numbers, reference))


def _forget(numbers: Sequence[int], dropped: weakref.ref[ValueHolder]) -> None:
    # Not by a walk through the dictionary: collection of another engine may change it meanwhile.
    for number in numbers:
        if _holders.get(number) is dropped:
            del _holders[number]


def _find_holder(param: nn.Parameter) -> ValueHolder | None:
    reference = _holders.get(id(param))
    return None if reference is None else reference()


def _has_no_engine(param: nn.Parameter) -> bool:
    holder = _find_holder(param)
    return holder is None or holder.is_ended


def _holder_of(param: nn.Parameter) -> ValueHolder:
    holder = _find_holder(param)
    if holder is None:
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} holds no value: its engine was dropped "
            "without engine.unwrap(), which leaves the values in the model. Load a checkpoint into "
            "an engine over a new model"
        )
    return holder
