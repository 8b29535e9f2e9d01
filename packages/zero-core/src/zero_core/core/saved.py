"""Weights that autograd saves, and which are gathered again when it reads them.

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

A parameter that no unit has gathered is packed as a `SavedParam`:
[Note: parameters saved between two gathers] in `zero_core.runtime.gathered`.
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
forward. A plain tuple, as there is one for each use of a weight, and a test for each saved tensor.
"""


class SavedParam:
    """A parameter that autograd saved, of this engine or of another one."""

    def gather(self, saved: SavedWeights) -> Tensor:
        """Gather the values to the end of the backward of ``saved``. Every rank must call it."""
        raise NotImplementedError


class _Cast(NamedTuple):
    """A cast of a weight, which is packed, or a view of the cast."""

    weight: SavedParam | _Packed
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


_Saved = Tensor | SavedParam | _Cast | _Packed


class Backward(Protocol):
    """Begins the backwards of units: `BackwardPass`, whose file imports this one."""

    def begin(self) -> None: ...

    def enter(self, unit: Unit, forward: Forward | None) -> None: ...


class SavedWeights:
    """Packs what autograd saves of gathered units. See [Note: saved tensors].

    Attributes:
        gathered: what is packed, by the address of its buffer, until it is released.
        entered: the block that backward is in, whose weights need no gather.
        refer: returns what is saved for a parameter that no unit has gathered.
        references: contexts of the parameters that this backward has gathered for `SavedParam`.
        referenced: ids of these.
    """

    def __init__(self) -> None:
        self.gathered: dict[int, tuple[Unit, FlatParams]] = {}
        self.entered: Unit | None = None
        self.refer: Callable[[nn.Parameter], SavedParam | None] = lambda param: None
        self.references = ExitStack()
        self.referenced: set[int] = set()
        # Addresses between which these buffers lie, of those seen so far.
        self._low, self._high = sys.maxsize, 0
        # The forward that is watched, and who begins its backward. What it saves holds both.
        self._forward: Forward | None = None
        self._backward: Backward | None = None
        # By thread, as torch's stack of hooks is the thread's own.
        self._hooks: dict[int, AbstractContextManager[Any]] = {}
        self._is_autocast = False  # in this forward

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
        """Release the parameters that backward has gathered for `SavedParam`."""
        self.referenced.clear()
        self.references.pop_all().close()

    def begin_forward(self, forward: Forward, backward: Backward) -> None:
        """Watch what autograd saves until `end_forward`, for ``backward`` to gather again."""
        self._forward, self._backward = forward, backward
        self.watch_thread()

    def watch_thread(self) -> None:
        """Watch what this thread's operations save for the forward that has begun."""
        assert self._backward is not None, "begin_forward comes first"
        self._is_autocast = is_autocast_enabled()
        unpack = partial(self.unpack, self._backward)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, unpack)
        self._hooks[threading.get_ident()] = hooks
        hooks.__enter__()

    def leave_thread(self) -> None:
        """End `watch_thread`."""
        hooks = self._hooks.pop(threading.get_ident(), None)
        if hooks is not None:
            hooks.__exit__(None, None, None)

    def end_forward(self) -> None:
        """End the forward that has begun, if one has."""
        self._forward = self._backward = None  # what was saved alone keeps them alive
        self.leave_thread()
        self._hooks.clear()  # of threads that have ended

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
        # Most by far: activations.
        source = autocast_source(tensor) if self._is_autocast else None
        packed = None if source is None else self._pack(source)
        if packed is None or isinstance(packed, Tensor | _Cast):
            # A node that saves its own output would otherwise keep itself alive if no backward
            # comes.
            return tensor.detach()
        offset = int(tensor.storage_offset())
        return _Cast(packed, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def unpack(self, backward: Backward, packed: _Saved) -> Tensor:
        """Return what was saved, gathered again for ``backward``."""
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
        # create_graph: nodes of this backward save the tensor without our hooks and outlive the
        # buffer: copy.
        return saved.clone() if torch.is_grad_enabled() else saved

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
