"""Weights saved by autograd, which are gathered again when backward reads them.

[Note: saved tensors]
Autograd saves the weights that a forward used. At stage 3 other units reuse the gathered buffer. So
hooks of `torch.autograd.graph` pack a saved view of a pool buffer as segment, offset and shape, and
gather the unit again when backward unpacks it. The first unpacking, or the first recomputation by
activation checkpointing, marks the beginning of a unit's backward. A node that reads quantized
weights may save them without calling the hooks. Then a hook on the output of the node's module
marks the beginning (`SavedWeights.watch_outputs`).

Under autocast a node saves a cast of its weight, which would occupy memory until backward. The cast
is packed as the weight and the dtype, and repeated in backward. A cast of a weight that requires no
gradient has no link to the weight, and is kept.

A parameter of an engine that no unit has gathered is packed as a `SavedParam`: [Note: parameters
saved between two gathers] in `zero_core.runtime.gathered`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
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
forward. A plain tuple, because it is fast to create and to test."""


def is_in_backward() -> bool:
    """Whether autograd runs a backward on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


class SavedParam:
    """A parameter saved by autograd, of this engine or of another engine."""

    def gather(self, saved: SavedWeights) -> Tensor:
        """Gather the values. They stay gathered until backward ends. Every rank must call it."""
        raise NotImplementedError


class _Cast(NamedTuple):
    """A cast of a packed weight, or a view of the cast."""

    weight: SavedParam | _Packed
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


_Saved = Tensor | SavedParam | _Cast | _Packed


class Backward(Protocol):
    """Interface of `BackwardPass`, whose module imports this one."""

    def begin(self) -> None: ...

    def enter(self, unit: Unit, forward: Forward | None) -> None: ...


class SavedWeights:
    """Packing of the weights that autograd saves. See [Note: saved tensors].

    Attributes:
        gathered: unit and segment of each gathered buffer, by the buffer's address.
        entered: the block that backward is in. Its weights are gathered.
        refer: returns the object to save instead of a parameter that no unit has gathered, or None.
        references: open contexts of the parameters gathered for `SavedParam` in this backward.
        referenced: ids of these parameters.
    """

    def __init__(self) -> None:
        self.gathered: dict[int, tuple[Unit, FlatParams]] = {}
        self.entered: Unit | None = None
        self.refer: Callable[[nn.Parameter], SavedParam | None] = lambda param: None
        self.references = ExitStack()
        self.referenced: set[int] = set()
        # Address range of the buffers passed to `add`, as a fast check. The end is exclusive.
        self._low, self._high = sys.maxsize, 0
        # The watched forward and its backward. Packed weights and unpack hooks reference them.
        self._forward: Forward | None = None
        self._backward: Backward | None = None
        # By thread, because each thread has its own stack of hooks in torch.
        self._hooks: dict[int, AbstractContextManager[Any]] = {}
        self._is_autocast = False  # whether the watched forward runs under autocast

    def add(self, unit: Unit, flat: FlatParams) -> None:
        """Pack views of ``flat``, which has been gathered, until `gathered` drops its address."""
        assert flat.full is not None
        address = flat.full.data_ptr()
        self.gathered[address] = (unit, flat)
        if not self._low <= address < self._high:
            self._low = min(self._low, address)
            self._high = max(self._high, address + flat.full.untyped_storage().nbytes())

    def forget_range(self) -> None:
        """Reset the address range, because buffers will be freed. Call it if none is gathered."""
        self._low, self._high = sys.maxsize, 0

    def begin_forward(self, forward: Forward, backward: Backward) -> None:
        """Pack weights that autograd saves in this thread for ``backward``, until `end_forward`."""
        self._forward, self._backward = forward, backward
        hooks = self._hooks[threading.get_ident()] = self.hooks()
        hooks.__enter__()

    def hooks(self) -> AbstractContextManager[Any]:
        """Return torch's hooks, which pack tensors that operations save for this forward."""
        assert self._backward is not None, "begin_forward comes first"
        self._is_autocast = is_autocast_enabled()
        unpack = partial(self.unpack, self._backward)
        return torch.autograd.graph.saved_tensors_hooks(self._pack, unpack)

    def leave_thread(self) -> None:
        hooks = self._hooks.pop(threading.get_ident(), None)
        if hooks is not None:
            hooks.__exit__(None, None, None)

    def end_forward(self) -> None:
        self._forward = self._backward = None
        self.leave_thread()
        self._hooks.clear()  # hooks of other threads, which cannot be exited here

    def _pack(self, tensor: Tensor) -> _Saved:
        if type(tensor) is not Tensor and access.is_refused(tensor):
            return self.refer(cast(nn.Parameter, tensor)) or tensor
        found = None
        if self._low <= tensor.data_ptr() < self._high:
            found = self.gathered.get(tensor.untyped_storage().data_ptr())
        if found is not None:
            unit, flat = found
            layout = (tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())
            assert self._forward is not None
            return (unit, flat, *layout, flat.version, self._forward)
        if tensor.is_leaf:
            param = self.refer(tensor) if isinstance(tensor, nn.Parameter) else None
            return tensor if param is None else param
        # Most other saved tensors are activations, which are only detached.
        source = autocast_source(tensor) if self._is_autocast else None
        packed = None if source is None else self._pack(source)
        if packed is None or isinstance(packed, Tensor | _Cast):
            # Detach, because a node that saves its own output would form a reference cycle.
            return tensor.detach()
        offset = int(tensor.storage_offset())
        return _Cast(packed, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def unpack(self, backward: Backward, packed: _Saved) -> Tensor:
        """Return the saved tensor. If it is a packed weight, ``backward`` gathers its unit."""
        if isinstance(packed, Tensor):
            return packed
        if isinstance(packed, _Cast):
            weight = self.unpack(backward, packed.weight)
            return weight.to(packed.dtype).as_strided(packed.shape, packed.stride, packed.offset)
        if isinstance(packed, SavedParam):
            backward.begin()
            return packed.gather(self)
        unit, flat, dtype, offset, shape, stride, version, forward = packed
        if version != flat.version:
            raise _outdated(unit)
        if unit is not self.entered:
            backward.enter(unit, forward)
        assert flat.full is not None
        full = flat.full if dtype is flat.full.dtype else flat.full.view(dtype)
        saved = full.as_strided(shape, stride, offset)
        # With create_graph, nodes of this backward save the tensor without these hooks and outlive
        # the buffer. So copy the tensor.
        return saved.clone() if torch.is_grad_enabled() else saved

    def watch_outputs(self, unit: Unit, output: object) -> None:
        """Gather ``unit`` before the backward of the module that returned ``output``.

        The module read quantized components of ``unit``. See [Note: saved tensors], and [Note:
        quantized parameters] in `zero_core.layout.discovery`.
        """
        forward, backward = self._forward, self._backward
        if forward is None or backward is None:
            return  # no gradients, or a recomputation, which has entered the unit
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
