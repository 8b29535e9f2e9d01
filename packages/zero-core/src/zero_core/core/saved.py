"""Weights and parameters that autograd saves, and which are gathered again when it reads them.

[Note: saved tensors]
Autograd saves the weights that a forward used. At stage 3 their buffer is reused for other units,
so what is saved of a pool buffer is only (segment, offset, shape): `torch.autograd.graph`'s hooks
pack it when it is saved, and gather the unit again when backward unpacks it. The first unpacking,
or the first recomputation by activation checkpointing, marks the beginning of a unit's backward. A
node that reads quantized weights may save them where no hook sees it. Then the gradient of what its
module returned marks the beginning (`SavedWeights.watch_outputs`).

Under autocast a node saves a cast of its weight, which would stay from forward to backward. It is
packed as the weight and the dtype, and cast again when backward unpacks it. A weight without
gradients leaves no trace in its cast, which is kept.

[Note: parameters saved between two gathers]
A forward may use a parameter within `gathered` alone, of this engine or of another one: a teacher's
head in a fused loss. Torch saves what an ``autograd.Function`` names after its forward has
returned, when the context may have ended: the parameter is a placeholder then, or a copy that is
about to go. So it is saved by reference, and gathered again when backward unpacks it, to the end of
that backward. Every rank must unpack it, as it must enter `gathered`. What is computed within
`gathered` alone, outside of a forward (a penalty of the weights), is watched likewise:
`SavedWeights.watching_gathered`.
"""

from __future__ import annotations

import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from zero_core._torch import autocast_source, is_autocast_enabled, pytree
from zero_core.core import access
from zero_core.core.order import Forward
from zero_core.core.params import FlatParams
from zero_core.core.unit import Unit

_Packed = tuple[Unit, FlatParams, torch.dtype, int, torch.Size, tuple[int, ...], int, Forward]
"""A weight that autograd saved: unit, segment, dtype, offset, shape, strides, version, and the
forward. A plain tuple, as there is one for each use of a weight, and a test for each saved tensor.
"""


class ParamHolder(Protocol):
    """Gathers an engine's parameters.

    `zero_core.runtime.gathered.GatheredParams` is the one implementation.
    """

    def version_of(self, param: nn.Parameter) -> int | None:
        """Return the version of the values of ``param``, None if the engine shards none of it."""

    def some_params(
        self, params: list[nn.Parameter], modifier_rank: int | None
    ) -> AbstractContextManager[Any]:
        """Gather ``params`` within."""


class Reference(NamedTuple):
    """A parameter that autograd saved, its engine's, and the version of its values then."""

    param: nn.Parameter
    holder: ParamHolder
    version: int


class _Cast(NamedTuple):
    """A cast of a weight, which is packed, or a view of the cast."""

    weight: Reference | _Packed
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Part(NamedTuple):
    """Memory of a parameter that autograd saved outside of a forward: itself, or a view."""

    reference: Reference
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    nbytes_before: int


_Saved = Tensor | Reference | _Cast | _Part | _Packed


class Holding:
    """A holder among those that are asked, until `remove`."""

    def __init__(self, holder: ParamHolder) -> None:
        self._holder = weakref.ref(holder)
        _holders[:] = [ref for ref in _holders if ref() is not None]
        _holders.append(self._holder)

    def remove(self) -> None:
        _holders[:] = [ref for ref in _holders if ref is not self._holder]


_holders: list[weakref.ref[ParamHolder]] = []  # the newest last


def refer(param: nn.Parameter) -> Reference | None:
    """Return a reference to ``param``, None if its memory is its own."""
    for holder in filter(None, (ref() for ref in reversed(_holders))):
        version = holder.version_of(param)
        if version is not None:
            return Reference(param, holder, version)
    return None


class Backward(Protocol):
    """Begins the backwards of units: `BackwardPass`, whose file imports this one."""

    def begin(self) -> None:
        """Begin a backward, unless one is open."""

    def enter(self, unit: Unit, forward: Forward | None) -> None:
        """Gather ``unit`` for the backward of ``forward``."""


class SavedWeights:
    """Packs what autograd saves of gathered units. See [Note: saved tensors].

    Attributes:
        gathered: what is packed, by the address of its buffer, until it is released.
        entered: the block that backward is in, whose weights need no gather.
    """

    def __init__(self) -> None:
        self.gathered: dict[int, tuple[Unit, FlatParams]] = {}
        # Addresses between which these buffers lie, of those seen so far.
        self._low, self._high = sys.maxsize, 0
        # What this backward has unpacked by reference: it stays gathered.
        self._referenced: set[int] = set()
        self._references = ExitStack()
        # The forward that is watched, and who begins its backward. What it saves holds both.
        self._forward: Forward | None = None
        self._backward: Backward | None = None
        # By thread, as torch's stack of hooks is the thread's own.
        self._hooks: dict[int, AbstractContextManager[Any]] = {}
        self._is_autocast = False  # in this forward
        self.entered: Unit | None = None

    def add(self, unit: Unit, flat: FlatParams) -> None:
        """Pack from now on what is saved of ``flat``, which has been gathered."""
        assert flat.full is not None
        address = flat.full.data_ptr()
        self.gathered[address] = (unit, flat)
        if not self._low <= address < self._high:
            self._low = min(self._low, address)
            self._high = max(self._high, address + flat.full.untyped_storage().nbytes())

    def forget_range(self) -> None:
        """Note that no unit is gathered, and that the memory of buffers is freed."""
        self._low, self._high = sys.maxsize, 0

    def release_references(self) -> None:
        """Release the parameters that backward has gathered by reference."""
        self._referenced.clear()
        self._references.pop_all().close()

    def begin_forward(self, forward: Forward, backward: Backward) -> None:
        """Watch what autograd saves, until `end_forward`.

        ``backward`` gathers units when autograd reads what was saved of them.
        """
        self._forward, self._backward = forward, backward
        self.watch_thread()

    def watch_thread(self) -> None:
        """Watch what this thread's operations save for the forward that has begun."""
        assert self._backward is not None, "begin_forward comes first"
        self._is_autocast = is_autocast_enabled()
        unpack = partial(self._unpack, self._backward)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, unpack)
        self._hooks[threading.get_ident()] = hooks
        hooks.__enter__()

    def leave_thread(self) -> None:
        """End `watch_thread`."""
        hooks = self._hooks.pop(threading.get_ident(), None)
        if hooks is not None:
            hooks.__exit__(None, None, None)

    @contextmanager
    def watching_gathered(
        self, params: Sequence[nn.Parameter], holder: ParamHolder, backward: Backward
    ) -> Iterator[None]:
        """Pack what is saved of ``params`` within, which ``holder`` has gathered."""
        with torch.no_grad():
            spans = sorted(
                (p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), n)
                for n, p in enumerate(params)
            )
        starts = [start for start, _, _ in spans]

        def pack(tensor: Tensor) -> _Saved:
            place = bisect_right(starts, tensor.data_ptr()) - 1
            if place < 0 or tensor.data_ptr() >= spans[place][1]:
                return tensor if tensor.is_leaf else tensor.detach()
            start, _, number = spans[place]
            param = params[number]
            version = holder.version_of(param)
            assert version is not None, "it is sharded"
            return _Part(
                Reference(param, holder, version),
                tensor.dtype,
                tensor.shape,
                tensor.stride(),
                tensor.data_ptr() - start,
            )

        with torch.autograd.graph.saved_tensors_hooks(pack, partial(self._unpack, backward)):
            yield

    def end_forward(self) -> None:
        """End the forward that has begun, if one has."""
        self._forward = self._backward = None  # what was saved alone keeps them alive
        self.leave_thread()
        self._hooks.clear()  # of threads that have ended

    def _pack(self, tensor: Tensor) -> _Saved:
        if type(tensor) is not Tensor and access.is_refused(tensor):
            return refer(cast(nn.Parameter, tensor)) or tensor
        found = None
        if self._low <= tensor.data_ptr() < self._high:
            found = self.gathered.get(tensor.untyped_storage().data_ptr())
        if found is None:  # most by far: activations
            if not tensor.is_leaf:
                packed = self._pack_cast(tensor) if self._is_autocast else None
                # A node that saves its own output would otherwise keep itself alive if no backward
                # comes.
                return tensor.detach() if packed is None else packed
            reference = refer(tensor) if isinstance(tensor, nn.Parameter) else None
            return tensor if reference is None else reference
        unit, flat = found
        layout = (tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())
        assert self._forward is not None
        return (unit, flat, *layout, flat.version, self._forward)

    def _pack_cast(self, tensor: Tensor) -> _Cast | None:
        param = autocast_source(tensor)
        packed = None if param is None else self._pack(param)
        if packed is None or isinstance(packed, Tensor | _Cast | _Part):
            return None
        offset = int(tensor.storage_offset())
        return _Cast(packed, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def _unpack(self, backward: Backward, packed: _Saved) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, _Cast):
            weight = self._unpack(backward, packed.weight)
            return weight.to(packed.dtype).as_strided(packed.shape, packed.stride, packed.offset)
        if isinstance(packed, Reference):
            return self._unpack_reference(backward, packed)
        if isinstance(packed, _Part):
            whole = self._unpack_reference(backward, packed.reference).view(packed.dtype)
            offset = whole.storage_offset() + packed.nbytes_before // whole.element_size()
            return whole.as_strided(packed.shape, packed.stride, offset)
        unit, flat, dtype, offset, shape, stride, version, forward = packed
        if version != flat.version:
            raise _outdated(unit)
        if unit is not self.entered:
            backward.enter(unit, forward)
        assert flat.full is not None
        full = flat.full if dtype is flat.full.dtype else flat.full.view(dtype)
        saved = full.as_strided(shape, stride, offset)
        # create_graph: nodes of this backward save the tensor without our hooks and outlive the
        # buffer: copy.
        return saved.clone() if torch.is_grad_enabled() else saved

    def _unpack_reference(self, backward: Backward, reference: Reference) -> Tensor:
        """Gather the values, unless they are held already. Every rank must call it.

        Raises:
            RuntimeError: they have changed since they were saved.
        """
        backward.begin()
        param, holder, version = reference
        if holder.version_of(param) != version:
            raise RuntimeError(
                "backward of a forward that ran before the last step or load: a parameter of "
                f"shape {tuple(param.shape)} has changed since; run the forward again"
            )
        if id(param) not in self._referenced:
            self._references.enter_context(holder.some_params([param], None))
            self._referenced.add(id(param))
        return param.data.clone() if torch.is_grad_enabled() else param.data

    def watch_outputs(self, unit: Unit, output: object) -> None:
        """Have ``unit`` gathered before the backward of what made ``output`` from its components.

        See [Note: saved tensors], and [Note: quantized parameters] in `zero_core.layout.discovery`.
        """
        forward, backward = self._forward, self._backward
        if forward is None or backward is None:
            return  # nothing is saved; or activation checkpointing, which has entered the unit
        opaque = [(flat, flat.version) for flat in unit.params if flat.segment.is_opaque]

        def enter(grad: Tensor) -> None:
            for flat, version in opaque:
                if version != flat.version:
                    raise _outdated(unit)
            backward.enter(unit, forward)

        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(enter)  # type: ignore[no-untyped-call]


def _outdated(unit: Unit) -> RuntimeError:
    return RuntimeError(
        f"backward of a forward that ran before the last step or load: the weights of {unit!r} "
        "have changed since; run the forward again"
    )
