"""Classes of parameters, by which reads and writes between gathers wait or raise errors.

[Note: access]
Reading a parameter returns its current value or raises an error where it is read.

open      The parameter holds its value and has its own (original) class. Reads cost nothing. If
          the master weight has separate memory, reads of ``data`` are recorded: see `aliased`.
deferred  The value is being updated or gathered, as after a step at stages 1 and 2, or, in the tail
          unit, during a forward at stage 3. The first read waits for the value.
refused   The value is not current or not on this rank, as between two uses at stage 3. A read
          raises an error that says what to do.

1. A read starts no collective. Otherwise a log line on one rank would wait forever for the other
   ranks. `UnitSet.publish` and `UnitSet.launch_tail` launch the gathers of deferred parameters, in
   the same order on all ranks.
2. A deferred or refused parameter has a subclass of its own class. Torch calls the subclass's
   ``__torch_function__`` before any operation. Objects, hooks and gradients do not change.
3. Names, shapes, hooks and gradients need no value (`NEEDS_NO_VALUE`). Their use never waits or
   raises.
4. Any thread may read. The reading host thread waits under the lock of the `ValueHolder`.

No class can detect an alias (of ``param.data`` or by DLPack) that is kept across a step: see
docs/after-build.md.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import GetSetDescriptorType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from zero_core._torch import DisableTorchFunction, allow_foreach, pytree
from zero_core.core.pool import BufferViews, SegmentViews
from zero_core.layout.discovery import Quantized

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
        torch._has_compatible_shallow_copy_type,  # used by `nn.Module.to`
        *(torch.empty_like, torch.full_like, torch.ones_like, torch.rand_like, torch.randint_like),
        *(torch.randn_like, torch.zeros_like, Tensor.new_empty, Tensor.new_empty_strided),
        *(Tensor.new_full, Tensor.new_ones, Tensor.new_zeros),
    }
)
"""Functions that neither read nor write the values of a parameter."""
_requires_grad = _PROPERTIES["requires_grad"].__get__
_CONVERSIONS = frozenset(
    {
        *(Tensor.to, Tensor.type, Tensor.cpu, Tensor.cuda, Tensor.xpu, Tensor.float, Tensor.half),
        *(Tensor.bfloat16, Tensor.double),
    }
)
"""Functions that convert a tensor, or return the tensor itself or the name of its type."""
get_data, set_data = _PROPERTIES["data"].__get__, _PROPERTIES["data"].__set__
"""Read and set ``param.data``, whatever the parameter's class."""
_get_version = _PROPERTIES["_version"].__get__


def find_trainable(params: Sequence[Tensor]) -> list[bool]:
    """Return for each tensor whether it requires a gradient, ignoring overrides by its class."""
    with DisableTorchFunction():
        return list(map(_requires_grad, params))


class Cures(NamedTuple):
    """Advice for access to a sharded parameter, as worded in error messages."""

    read: str = "engine.gathered()"
    write: str = "engine.gathered(modifier_rank=...)"
    declare: str = "make it or its module a part of that one before build()"


# Reasons why a read (first) and a write (second) raise. The names in braces are fields of `Cures`.
SHARDED = (
    "where stage 3 holds only this rank's shard of it: read it within {read}, which all ranks "
    "enter; or, for the forward of another module, {declare}; or, for the backward of an "
    "autograd.Function, save it by ctx.save_for_backward()",
    "where stage 3 holds only this rank's shard of it, so the value would be lost: write it within "
    "{write}, which all ranks enter",
)
EARLY = (
    "between backward and step(), where it is half updated, as units are updated in backward: do "
    "it before backward or after step(), or set "
    "zero_optimization.offload_optimizer.update_in_backward to false",
) * 2
AWAY = ("while parameters are offloaded: call reload_states() first, on every rank",) * 2
ENDED = (
    "after its engine was closed, which left the values of other ranks behind: end an engine with "
    "engine.unwrap() in place of engine.close()",
) * 2


class ValueHolder(Protocol):
    """Interface of `zero_core.core.params.FlatParams`, whose module imports this one."""

    shown: ShownParams

    def await_values(self, param: nn.Parameter) -> None:
        """Wait for the value of the deferred ``param``, and make it readable."""


class _Closed:
    """Base class of parameters that are not open, but deferred or refused."""

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
        if func in NEEDS_NO_VALUE or (func == set_data and args[0] is args[1]):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[misc]
        target: Any = args[0] if args else next(iter(kwargs.values()), None)
        form = kwargs.get("memory_format", torch.preserve_format)
        if func in _CONVERSIONS and form is torch.preserve_format:
            # Converting the placeholder itself would allocate memory for all of its elements.
            empty = torch.empty((0,) * target.dim(), dtype=target.dtype, device=target.device)
            with DisableTorchFunction():
                found = func(empty, *args[1:], **kwargs)
            if found is empty:
                return target
            if not isinstance(found, Tensor):
                return found
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, _Closed):
                name = getattr(func, "__name__", "")  # foreign: torch defines ``func``
                writes = func == set_data or (name.endswith("_") and not name.endswith("__"))
                leaf._open(func, is_write=writes and leaf is target)
        return func(*args, **kwargs)

    def _open(self: Any, func: Any, *, is_write: bool) -> None:
        """Make the parameter readable for ``func``, or raise."""
        _holder_of(self).await_values(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._open(copy.deepcopy, is_write=False)
        return copy.deepcopy(self, memo)  # now calls the original class's method


class _Refused(_Closed):
    __slots__ = ()

    def _open(self: Any, func: Any, *, is_write: bool) -> None:
        holder = _holders.get(id(self))
        if func == set_data and (holder is None or holder.shown.why_refused is ENDED):
            open_all([self])  # no engine manages the parameter any more
            return
        raise RuntimeError(_holder_of(self).shown.refusal(self, is_write=is_write))

    def __repr__(self: Any, *, tensor_contents: Any = None) -> str:
        return f"Parameter(without values here, {tuple(self.shape)}, {self.dtype})"


# Use a slot wrapper, which runs in C: every gather calls it for every parameter.
_set_class = vars(object)["__class__"].__set__


class _OwnClasses(dict[type, type]):
    """Map from a class made by `_Classes` to its parameter class, and from others to themselves."""

    def __missing__(self, found: type) -> type:
        return found


_own_classes = _OwnClasses()


@functools.cache
def derive(base: type, own: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return a subclass of ``base`` and ``own``, which torch's optimizers treat like ``own``."""
    made = type(own.__name__, (base, own), {"__module__": __name__})
    allow_foreach(made)
    return made


class _Classes(dict[type, type]):
    """Cache of subclasses of a base and a parameter's class, by the parameter's class."""

    def __init__(self, base: type) -> None:
        super().__init__()
        self._base = base
        self.made: set[type] = set()

    def __missing__(self, found: type) -> type:
        own = _own_classes[found]
        made = self[own] = self[found] = derive(self._base, own)
        _own_classes[made] = own
        self.made.add(made)
        return made


_DEFERRED, _REFUSED = _Classes(_Closed), _Classes(_Refused)


def open_all(params: Sequence[nn.Parameter]) -> None:
    """Restore the own classes of parameters that hold their values."""
    list(map(_set_class, params, map(_own_classes.__getitem__, map(type, params))))


def defer(params: Sequence[nn.Parameter]) -> None:
    """Make the first read of each parameter wait for its value."""
    list(map(_set_class, params, map(_DEFERRED.__getitem__, map(type, params))))


def refuse(params: Sequence[nn.Parameter]) -> None:
    """Make reads of the parameters raise."""
    list(map(_set_class, params, map(_REFUSED.__getitem__, map(type, params))))


def is_refused(param: Tensor) -> bool:
    return isinstance(param, _Refused)


def use_class(params: Iterable[nn.Parameter], own: type[nn.Parameter]) -> None:
    """Set ``own`` as the class that the parameters have while open."""
    for param in params:
        if isinstance(param, _Closed):
            param.__class__ = (_REFUSED if is_refused(param) else _DEFERRED)[own]
        else:
            param.__class__ = own


def set_class(param: Tensor, found: type[Tensor]) -> None:
    """Set the class of ``param`` to ``found``, if it differs."""
    if type(param) is not found:
        param.__class__ = found


def own_class(param: nn.Parameter) -> type[nn.Parameter]:
    return _own_classes[type(param)]


@contextmanager
def opened(params: Iterable[nn.Parameter | None]) -> Iterator[None]:
    """Set the parameters' own classes within the context, for use by the engine."""
    before = [(param, type(param)) for param in params if param is not None]
    open_all([param for param, _ in before])
    try:
        yield
    finally:
        for param, found in before:
            param.__class__ = found


aliased: set[int] = set()
"""Ids of parameters, watched by `Edits`, whose ``data`` was read or set."""


def take_aliased(params: Sequence[Tensor]) -> list[int]:
    """Return the positions of ``params`` that are in `aliased`, and remove them from `aliased`."""
    if not aliased:
        return []
    found = [position for position, param in enumerate(params) if id(param) in aliased]
    aliased.difference_update(id(params[position]) for position in found)
    return found


_holders: weakref.WeakValueDictionary[int, ValueHolder] = weakref.WeakValueDictionary()
"""`ValueHolder` of each registered parameter, by the parameter's id."""


def register(holder: ValueHolder, params: Iterable[nn.Parameter]) -> None:
    """Register ``holder``, by weak reference, to answer reads of ``params``."""
    _holders.update(dict.fromkeys(map(id, params), holder))


def _holder_of(param: nn.Parameter) -> ValueHolder:
    holder = _holders.get(id(param))
    if holder is None:
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} holds no value: its engine was dropped "
            "without engine.unwrap(), which leaves the values in the model. Load a checkpoint into "
            "an engine over a new model"
        )
    return holder


class ShownParams:
    """The parameters of one segment, as user code sees them.

    Attributes:
        params: the model's parameters, or components of quantized ones, in the order of the slots.
        read_params: the model's parameters that its code reads: the quantized ones if ``params``
            are components, otherwise the same as ``params``.
        has_masters_apart: whether the master weights are in other memory than the values.
        why_refused: reasons for refusing a read and a write: a pair such as `SHARDED`.
        is_shown: whether the parameters are views of a buffer of values.
        is_closed: whether reads wait or raise, except reads of parameters with a copy.
        written: a parameter that user code wrote before its buffer was released, until reported.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        views: SegmentViews,
        names: Sequence[str],
        quantized: Sequence[Quantized],
        *,
        rank: int,
        has_masters_apart: bool,
    ) -> None:
        """Hold ``params``, one per slot, with their ``names``.

        ``quantized``: quantized parameters of the model if ``params`` are their components.
        """
        self.params = list(params)
        parts = [(q.name, q.param, q.components) for q in quantized] or [
            (name, param, (param,))
            for name, param in zip(names, params, strict=True)
            if isinstance(param, nn.Parameter)
        ]
        self._names = [name for name, _, _ in parts]
        self.read_params = [param for _, param, _ in parts]
        position_of = {id(param): position for position, param in enumerate(params)}
        self._positions = [
            [position_of[id(c)] for c in components if id(c) in position_of]
            for _, _, components in parts
        ]
        self.has_masters_apart = has_masters_apart
        self.cures = Cures()
        self.why_refused = SHARDED
        self.is_shown = False
        self.is_closed = True
        self.written: nn.Parameter | None = None
        self._rank = rank
        self._versions = list(map(_get_version, self.params))
        self._moved: int | None = None  # position of a parameter whose data was replaced
        self._views = views
        self._shown = views.placeholders  # views or placeholders in use
        # By position: the copy that a hidden parameter is a view of, and its number of holders.
        self._copies: dict[int, Tensor] = {}
        self._num_holders: Counter[int] = Counter()

    # ------------------------------------------------------ show or hide values

    def show(self, full: Tensor) -> None:
        """Make the parameters views of ``full``, [padded_numel], and readable."""
        open_all(self.read_params)
        self.is_closed = False
        if not self.is_shown:
            if self._copies:
                self._note_written(list(map(_get_version, self.params)))
            self._shown = self._views.of(full)
            list(map(set_data, self.params, self._shown.slots))
            self.is_shown = True

    def withdraw(self) -> None:
        """Hide the parameters before their buffer is reused. Record a replaced and a written one.

        A write to the buffer would be lost when another unit uses the buffer.
        """
        if self.is_shown:
            addresses = list(map(Tensor.data_ptr, self.params))
            is_moved = addresses != self._shown.addresses or self._views.is_opaque
            if is_moved and self._moved is None:
                self._moved = self._find_moved()
            self._note_written(list(map(_get_version, self.params)))
        self.hide()

    def hide(self) -> None:
        """Make the parameters refused placeholders, except those with copies."""
        if self.is_closed:
            open_all(self.read_params)
        self._shown = self._hidden() if self._copies else self._views.placeholders
        list(map(set_data, self.params, self._shown.slots))
        self.is_shown = False
        self.is_closed = True
        refuse(self._absent() if self._copies else self.read_params)

    def _hidden(self) -> BufferViews:
        """Return the parameters' copies, and placeholders for parameters without a copy."""
        holes = enumerate(self._views.placeholders.slots)
        slots = [self._copies.get(position, hole) for position, hole in holes]
        return BufferViews(slots, [], list(map(Tensor.data_ptr, slots)))

    def _absent(self) -> list[nn.Parameter]:
        """Return the parameters whose values are not completely held in copies."""
        return [
            param
            for param, positions in zip(self.read_params, self._positions, strict=True)
            if not all(position in self._copies for position in positions)
        ]

    def defer(self) -> None:
        self.is_closed = True
        defer(self.read_params)

    def refuse(self, why: tuple[str, str]) -> None:
        self.why_refused = why
        self.is_closed = True
        refuse(self.read_params)

    def refusal(self, param: Tensor, *, is_write: bool) -> str:
        """Return the error message for a read or write of the refused ``param``."""
        what = f"parameter {self.name_of(param)} was {'written' if is_write else 'read'}"
        why = self.why_refused[is_write].format(**self.cures._asdict())
        return f"rank {self._rank}: {what} {why}"

    def name_of(self, param: Tensor) -> str:
        return self._names[[p is param for p in self.read_params].index(True)]

    def dtype_of(self, position: int) -> torch.dtype:
        return self._views.forms[position].dtype

    # ------------------------------------------------- changes by user code

    def forget_marks(self) -> None:
        """Treat the current parameter values as written by this engine, not by user code."""
        if self.has_masters_apart:
            take_aliased(self.params)
        with DisableTorchFunction():
            self._versions = list(map(_get_version, self.params))

    def take_marks(self) -> list[tuple[int, bool]]:
        """Return positions of parameters that user code may have written since the last call.

        Each has a bool, which is True if a write is certain. `forget_marks` counts as a call.
        """
        with DisableTorchFunction():
            before, self._versions = self._versions, list(map(_get_version, self.params))
        found = dict.fromkeys(take_aliased(self.params), False)
        if before != self._versions:
            pairs = enumerate(zip(before, self._versions, strict=True))
            found |= {position: True for position, (old, new) in pairs if old != new}
        return sorted(found.items())

    def _note_written(self, versions: list[int]) -> None:
        """Record a parameter that was written in a buffer that is about to be released."""
        if versions == self._versions:
            return
        pairs = enumerate(zip(versions, self._versions, strict=True))
        position = next(position for position, (now, before) in pairs if now != before)
        self._versions = versions
        param = self.params[position]
        self.written = param if isinstance(param, nn.Parameter) else None

    def misplaced(self) -> int | None:
        """Return the position of a parameter whose ``data`` other code has replaced, or None.

        A replacement that `withdraw` has recorded is returned once.
        """
        moved, self._moved = self._moved, None
        return self._find_moved() if moved is None else moved

    def _find_moved(self) -> int | None:
        is_hidden = not (self.is_shown or self._copies)
        if is_hidden and all(map(_REFUSED.made.__contains__, map(type, self.read_params))):
            return None  # the ``data`` of a refused parameter cannot be replaced
        with DisableTorchFunction():  # reading an address must not count as a read of the value
            found = list(map(Tensor.data_ptr, self.params))
        expected = self._shown.addresses
        if self._views.is_opaque:  # opaque buffers get a new address at each refill
            expected = list(map(Tensor.data_ptr, self._shown.slots))
        if found == expected:
            return None
        return next(i for i, address in enumerate(expected) if found[i] != address)

    def restore(self, position: int) -> bool:
        """Make a parameter a view again if its ``data`` was replaced. Return whether it was."""
        tensor, found = self._shown.slots[position], self.params[position]
        with DisableTorchFunction():  # an address needs no value
            is_replaced = (found.data_ptr(), found.shape) != (tensor.data_ptr(), tensor.shape)
            if is_replaced:
                found.data = tensor
        return is_replaced

    # ----------------------------------------------------------------- copies

    def copy_of(self, position: int) -> Tensor | None:
        """Return the copy that the parameter uses while hidden, if there is one."""
        return self._copies.get(position)

    def hold(self, position: int, copy: Tensor | None) -> Tensor:
        """Make a hidden parameter a view of ``copy``, and count one holder. Return the copy in use.

        An existing copy stays in use. ``copy`` may then be None.
        """
        self._num_holders[position] += 1
        if position not in self._copies:
            assert copy is not None, "the first holder has the values"
            self._copies[position] = copy
            if not self.is_shown:
                self.hide()
        return self._copies[position]

    def drop(self, position: int) -> None:
        """Release one `hold`. The copy is freed with its last holder."""
        self._num_holders[position] -= 1
        if self._num_holders[position]:
            return
        del self._copies[position]
        if not self.is_shown:
            self._shown = self._hidden()
            with DisableTorchFunction():  # a component may belong to a refused parameter
                set_data(self.params[position], self._shown.slots[position])
            refuse(self._absent())

    def write_copies(self, start: int, values: Tensor) -> None:
        """Overwrite copies with ``values``, which start at element ``start`` of the segment."""
        for position, held in self._copies.items():
            slot = self._views.slots[position]
            first, last = max(start, slot.start), min(start + values.numel(), slot.stop)
            if first < last:
                elements = self._views.forms[position].to_elements(held)
                part = elements[first - slot.start : last - slot.start]
                part.copy_(values[first - start : last - start])
