"""Memory of a parameter: one tensor, or the several tensors that a quantizer keeps for it.

[Note: quantized parameters]
A quantized parameter is bytes and metadata. Its *components* are the plain tensors that hold the
bytes:
- of a tensor subclass that wraps others (torchao): the tensors that ``__tensor_flatten__`` names,
  and theirs if these wrap others in turn;
- of a parameter of another class than ``nn.Parameter`` (bitsandbytes): its own memory and the
  tensors in its attributes, as in ``quant_state.absmax``;
- of an ``nn.Parameter`` of integers or of 8-bit floats: itself.
A component keeps its object, its shape, its strides and its bits: the engine only replaces its
memory. So whatever holds it (the wrapper, a ``QuantState``, a node of autograd) sees the same
values. Nothing is ever cast. The components of a unit lie in one segment of bytes.
All other metadata (block sizes, dtypes) stays where it is, whole on every rank. A module may repack
its weight for a forward (bitsandbytes does so on CPUs, in evaluation): after that forward memory
and metadata are put back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from zero_core._torch import DisableTorchFunction, inner_tensors, storage_of
from zero_core.errors import ConfigError
from zero_core.protocols import PartitionedParam

if TYPE_CHECKING:
    from typing_extensions import TypeIs

BYTES_ALIGNMENT = 64
"""Bytes to which components are aligned, for every dtype and for vector registers."""
_MAX_DEPTH = 4  # of attributes: Params4bit.quant_state.state2.absmax has 3
_NO_METADATA = (nn.Module, Enum, type, FunctionType, MethodType, ModuleType)


class Component(NamedTuple):
    """A plain tensor of a parameter."""

    path: str  # its attribute as seen from the parameter, "" for the parameter's own memory
    tensor: Tensor  # the object that the parameter holds


def is_storage_dtype(dtype: torch.dtype) -> bool:
    """Whether values of ``dtype`` mean nothing without a scale: integers and 8-bit floats."""
    return not (dtype.is_floating_point or dtype.is_complex) or dtype.itemsize == 1


def is_partitioned(tensor: object) -> TypeIs[PartitionedParam]:
    """Whether ``tensor`` has its value elsewhere."""
    # Plain classes first: Python looks for each member of a protocol, for microseconds.
    is_plain = type(tensor) in (nn.Parameter, Tensor)
    return not is_plain and isinstance(tensor, PartitionedParam)


def components(name: str, param: Tensor) -> tuple[Component, ...]:
    """Return the tensors that hold the bytes of ``param``, itself if it is not quantized."""
    if is_partitioned(param):
        return (Component("", param),)
    if inner_tensors(param) is not None:
        dtensor = sys.modules.get("torch.distributed.tensor")
        if dtensor is not None and isinstance(param, dtensor.DTensor):
            raise ConfigError(
                f"parameter {name} is a DTensor, which other code has sharded: build the engine "
                "from the model before fully_shard() or parallelize_module()"
            )
        if param.requires_grad:
            kind = f"{type(param).__module__}.{type(param).__qualname__}"
            raise ConfigError(
                f"parameter {name} is a {kind}, a tensor subclass, and requires a gradient: "
                "quantized parameters are not trained. Freeze it by requires_grad_(False) and "
                "train adapters, or leave its class out (for torchao.float8: "
                "enable_fsdp_float8_all_gather=False)"
            )
    found = stored_tensors(param)
    for path, tensor in found:
        if tensor.layout is not torch.strided:
            where = f"{name}.{path}" if path else name
            raise ConfigError(
                f"parameter {where} is {tensor.layout}, which has no flat memory to shard: "
                "make it dense"
            )
    return tuple(found)


def stored_tensors(param: Tensor) -> list[Component]:
    """Return the components of ``param``, which may be of a class that cannot be sharded."""
    if inner_tensors(param) is not None:
        return list(inner_components("", param))
    found = [Component("", param)]
    if type(param) is not nn.Parameter and not param.requires_grad:
        found += _attached("", param, {id(param)}, _MAX_DEPTH)
    return found


def inner_components(path: str, tensor: Tensor) -> Iterator[Component]:
    """Yield the plain tensors that the ``tensor`` at ``path`` consists of: itself, or several."""
    parts = inner_tensors(tensor)
    if parts is None:
        yield Component(path, tensor)
        return
    for attribute, inner in parts[0].items():
        yield from inner_components(f"{path}.{attribute}".lstrip("."), inner)


def _attached(path: str, value: object, seen: set[int], depth: int) -> Iterator[Component]:
    """Yield the tensors in the attributes of ``value`` and of the plain objects in them."""
    # foreign: objects of a quantizer
    for attribute, found in getattr(value, "__dict__", {}).items():
        if id(found) in seen or isinstance(found, _NO_METADATA):
            continue
        seen.add(id(found))
        where = f"{path}.{attribute}".lstrip(".")
        if isinstance(found, Tensor):
            if not isinstance(found, nn.Parameter) and not found.requires_grad:
                yield from inner_components(where, found)
        elif depth > 1:
            yield from _attached(where, found, seen, depth - 1)


class Metadata:
    """Snapshot of the attributes of a parameter with attached components."""

    def __init__(self, param: Tensor) -> None:
        self._found: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # by id: now, and before
        values: list[object] = [param]
        for _ in range(_MAX_DEPTH):
            # foreign: objects of a quantizer
            tables = [t for value in values if (t := getattr(value, "__dict__", {}))]
            values = [
                value
                for table in tables
                if id(table) not in self._found
                for value in table.values()
                if not isinstance(value, (*_NO_METADATA, Tensor))
            ]
            self._found |= {id(table): (table, dict(table)) for table in tables}

    def put_back(self) -> None:
        for attributes, before in self._found.values():
            attributes.clear()
            attributes.update(before)


def is_same_memory(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are one view of one memory."""
    if first is second:
        return True
    views = [(t.dtype, t.shape, t.stride(), t.storage_offset()) for t in (first, second)]
    return views[0] == views[1] and storage_of(first) == storage_of(second)


def dim_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions from the slowest to the fastest one in memory.

    In their own order where there are no elements, or they overlap or leave gaps.
    """
    dims, strides = tuple(range(tensor.ndim)), tensor.stride()
    # Of equal strides all but one are of single elements, and that one comes first: so `unflatten`
    # gives these the strides that they have in channels-last formats.
    order = tuple(sorted(dims, key=lambda d: (-strides[d], -tensor.shape[d], d)))
    with DisableTorchFunction():  # it is no read
        return order if tensor.numel() and tensor.permute(order).is_contiguous() else dims


def flatten(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return the elements, 1-D, in ``order``, () for the shape's: a view if it is dense so."""
    return (tensor.permute(order) if order else tensor).reshape(-1)


def unflatten(flat: Tensor, shape: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    if not order:
        return flat.view(shape)
    dense = flat.view([shape[d] for d in order])
    return dense.permute([order.index(d) for d in range(len(order))])


def to_bytes(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return the bytes of ``tensor``, 1-D, in ``order``, its `dim_order`: a view if it is dense."""
    return flatten(tensor.detach(), order).view(torch.uint8)


def from_bytes(
    flat: Tensor, dtype: torch.dtype, shape: tuple[int, ...], order: tuple[int, ...]
) -> Tensor:
    return unflatten(flat.view(dtype), shape, order)
