"""Values in slices: see [Note: values in slices] in `zero_core.quantization`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from zero_core.comm.control import ControlGroup
from zero_core.init.tape import zeroed
from zero_core.layout.stored import is_same_memory


class Slice(NamedTuple):
    """This rank's elements of a tensor, as bytes: equally many on all ranks, padded at the end."""

    control: ControlGroup
    own: Tensor

    def keep(self, tensor: Tensor, values: Tensor) -> None:
        """Keep ``values``, this rank's `slice_range` of ``tensor``, in memory of their own."""
        numel = -(-tensor.numel() // self.control.world_size)
        self.own.set_(zeroed(numel * tensor.dtype.itemsize))
        self.own[: values.nbytes].copy_(values.view(torch.uint8))


_slices = WeakIdKeyDictionary()


def put_in_slices(tensors: Sequence[Tensor], control: ControlGroup) -> None:
    """Keep this rank's slices of ``tensors``, the same on every rank, and give their memory up.

    Tensors over one memory stay so. One that is not contiguous stays whole.
    """
    whole = [tensor.detach() for tensor in tensors]
    for place, tensor in enumerate(tensors):
        if not tensor.is_contiguous():
            continue
        twin = next(n for n in range(place + 1) if is_same_memory(whole[n], whole[place]))
        if twin < place:
            tensor.data = tensors[twin].data
            _slices[tensor] = _slices[tensors[twin]]
            continue
        first, last = slice_range(tensor, control)
        keep_slice(tensor, whole[place].view(-1)[first:last], control)


def slice_range(tensor: Tensor, control: ControlGroup) -> tuple[int, int]:
    """Return which elements of ``tensor`` are this rank's slice: ``[first, last)``."""
    numel = -(-tensor.numel() // control.world_size)
    first = min(control.rank * numel, tensor.numel())
    return first, min(first + numel, tensor.numel())


def keep_slice(tensor: Tensor, values: Tensor, control: ControlGroup) -> None:
    """Have ``tensor`` in slices. ``values``: this rank's `slice_range` of it."""
    found = Slice(control, torch.empty(0, dtype=torch.uint8))
    found.keep(tensor, values)
    hole = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
        hole.fill_(float("nan"))  # by which a read is noticed
    tensor.data = hole.expand(tensor.shape)
    _slices[tensor] = found


def is_in_slices(tensor: Tensor) -> bool:
    return tensor in _slices


def whole_value(tensor: Tensor) -> Tensor:
    """Return the value of a tensor in slices, on the CPU. Every rank must call it."""
    found: Slice = _slices[tensor]
    flat = found.control.gather(found.own)[: tensor.numel() * tensor.dtype.itemsize]
    return flat.view(tensor.dtype).view(tensor.shape)


@contextmanager
def gathered_slices(
    tensors: Sequence[Tensor], *, modifier_rank: int | None = None
) -> Iterator[None]:
    """Give those of ``tensors`` that are in slices their values in this context.

    At the end they are in slices again, with rank ``modifier_rank``'s values. By default, and when
    the body raises, changes are lost. One that the body gives other memory keeps that. Every rank
    must enter it with the same tensors.
    """
    found = [(tensor, _slices[tensor], tensor.data) for tensor in tensors if is_in_slices(tensor)]
    slices = {id(own): (own, tensor) for tensor, own, _ in found}  # several may share one
    values = {key: whole_value(t).to(t.device, copy=True) for key, (_, t) in slices.items()}
    for tensor, own, _ in found:
        tensor.data = values[id(own)]
        del _slices[tensor]
    try:
        yield
        if modifier_rank is not None:
            for key, (own, _) in slices.items():
                _send_slices(values[key], own, modifier_rank)
    finally:
        for tensor, own, hole in found:
            if is_same_memory(tensor, values[id(own)]):
                tensor.data = hole
                _slices[tensor] = own


def _send_slices(value: Tensor, slices: Slice, source: int) -> None:
    """Give each rank its slice of rank ``source``'s ``value``."""
    control, own = slices
    is_source = control.rank == source
    parts = torch.zeros(own.numel() * control.world_size if is_source else 0, dtype=torch.uint8)
    if is_source:
        parts[: value.nbytes] = value.view(-1).view(torch.uint8)
    sent = [own.numel() * is_source] * control.world_size
    received = [own.numel() * (rank == source) for rank in range(control.world_size)]
    own.copy_(control.exchange(parts, sent, received))


def slice_of(tensor: Tensor) -> Slice | None:
    """Return the slice of ``tensor``, if it has one."""
    return _slices[tensor] if is_in_slices(tensor) else None


def restore_slice(tensor: Tensor, found: Slice) -> None:
    """Have ``tensor`` in slices again, which it was before `forget_slice`."""
    _slices[tensor] = found


def forget_slice(tensor: Tensor) -> None:
    """Free the slice of ``tensor``, if it has one."""
    if tensor in _slices:
        del _slices[tensor]
