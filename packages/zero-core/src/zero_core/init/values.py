"""Initial values of a model: its own, recorded ones, or those of partitioned parameters.

A tensor may also be *in slices*: see [Note: values in slices] in `zero_core.quantization`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from zero_core._torch import DisableTorchFunction, pytree, swap_tensor
from zero_core.comm.control import ControlGroup
from zero_core.core import access
from zero_core.errors import ConfigError
from zero_core.init.deferred import recordings_of, zeroed
from zero_core.layout.discovery import is_partitioned, is_same_memory


class Slice(NamedTuple):
    """This rank's elements of a tensor, as bytes: equally many on all ranks, padded at the end."""

    control: ControlGroup
    own: Tensor

    def keep(self, tensor: Tensor, values: Tensor) -> None:
        """Keep ``values``, this rank's `slice_range` of ``tensor``, in memory of their own."""
        numel = -(-tensor.numel() // self.control.world_size)
        self.own.set_(zeroed(numel * tensor.dtype.itemsize))
        self.own[: values.nbytes].copy_(values.view(torch.uint8))


slices: MutableMapping[Tensor, Slice] = WeakIdKeyDictionary()
"""The `Slice` of each tensor that is in slices."""


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
            slices[tensor] = slices[tensors[twin]]
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
    slices[tensor] = found


def whole_value(tensor: Tensor) -> Tensor:
    """Return the value of a tensor in slices, on the CPU. Every rank must call it."""
    found = slices[tensor]
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
    found = [(tensor, slices[tensor], tensor.data) for tensor in tensors if tensor in slices]
    shared = {id(own): (own, tensor) for tensor, own, _ in found}  # several may share one
    values = {key: whole_value(t).to(t.device, copy=True) for key, (_, t) in shared.items()}
    for tensor, own, _ in found:
        tensor.data = values[id(own)]
        del slices[tensor]
    try:
        yield
        if modifier_rank is not None:
            for key, ((control, held), _) in shared.items():
                is_source = control.rank == modifier_rank
                numel = held.numel()
                parts = torch.zeros(numel * control.world_size * is_source, dtype=torch.uint8)
                if is_source:
                    parts[: values[key].nbytes] = values[key].view(-1).view(torch.uint8)
                sent = [numel * is_source] * control.world_size
                received = [numel * (rank == modifier_rank) for rank in range(control.world_size)]
                held.copy_(control.exchange(parts, sent, received))
    finally:
        for tensor, own, hole in found:
            if is_same_memory(tensor, values[id(own)]):
                tensor.data = hole
                slices[tensor] = own


class InitialValues:
    """Values of a model's tensors, computed one at a time."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._recordings = recordings_of(model)
        self.former: dict[int, Tensor] = {}
        """What parameters were that `take` has made ordinary, by ``id``."""

    def take(self, params: Iterable[Tensor]) -> None:
        """Make ``params`` ordinary tensors, which can be hooked. Their values can still be had."""
        for param in params:
            if is_partitioned(param) or param.is_meta:
                make_ordinary(param, self.former)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the value of ``tensor``: itself, or the recorded value, computed on the CPU.

        Zeros for one on the meta device that nothing is known of. Every rank must ask for one
        that `is_in_parts`.
        """
        tensor = self.former.get(id(tensor), tensor)
        if is_partitioned(tensor):
            return tensor.full_value()
        if tensor in slices:
            return whole_value(tensor)
        if not tensor.is_meta:
            return tensor.detach()
        for recording in self._recordings:
            if recording.knows(tensor):
                return recording.value(tensor)
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def is_recorded(self, tensor: Tensor) -> bool:
        """Return whether the value is recorded and has yet to be computed."""
        tensor = self.former.get(id(tensor), tensor)
        return tensor.is_deferred if is_partitioned(tensor) else tensor.is_meta

    def is_in_parts(self, tensor: Tensor) -> bool:
        """Return whether the ranks hold slices of the value."""
        tensor = self.former.get(id(tensor), tensor)
        if is_partitioned(tensor):
            return not tensor.is_deferred
        return tensor in slices

    def check(self, *, has_pretrained: bool) -> None:
        """Refuse unknown values, but for those that a file gives if it ``has_pretrained``."""
        for path, module in self._model.named_modules():
            kept = set(module._buffers) - module._non_persistent_buffers_set
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                is_in_file = has_pretrained and (name in module._parameters or name in kept)
                if tensor is None or is_in_file or tensor in slices:
                    continue
                whole_name = f"{path}.{name}" if path else name
                known = [r for r in self._recordings if r.knows(tensor)]
                if tensor.is_meta and not known:
                    raise ConfigError(
                        f"{whole_name} is on the meta device and its values are not known: make "
                        "the model under zero_core.deferred_init() instead of "
                        "torch.device('meta'), or, for parameters and persistent buffers, give "
                        "their file: build(..., pretrained=path)"
                    )
                if known and known[0].is_changed(tensor):
                    raise ConfigError(
                        f"{whole_name} was changed after deferred_init(), where nothing is "
                        "recorded: initialise and change the model within it, or use "
                        "zero_core.load_pretrained() after build()"
                    )
                if not is_partitioned(tensor) and access.is_refused(tensor):
                    raise ConfigError(
                        f"{whole_name} holds no value: it went with an engine that had it in "
                        "shards and was closed or dropped. Have the values read from a file "
                        "(build(..., pretrained=path), or load_state_dict() before build()); next "
                        "time end the engine with engine.unwrap(), which leaves them in the model"
                    )

    def give_attributes(self) -> None:
        """Compute the values of deferred tensors in plain attributes, on the CPU."""
        if not self._recordings:
            return

        def give(value: Any) -> Any:
            is_plain = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
            is_deferred = is_plain and any(r.knows(value) for r in self._recordings)
            return self.of(value) if is_deferred else value

        for module in self._model.modules():
            for name, value in vars(module).items():
                if name in ("_parameters", "_buffers", "_modules"):
                    continue
                leaves, spec = pytree.tree_flatten(value)
                given = [give(leaf) for leaf in leaves]
                if any(new is not old for new, old in zip(given, leaves, strict=True)):
                    vars(module)[name] = pytree.tree_unflatten(given, spec)


def make_ordinary(param: Tensor, former: dict[int, Tensor] | None = None) -> None:
    """Make ``param``, the same object, an ordinary CPU tensor of its shape without memory.

    Nothing to do where it has memory of its own. ``former`` gets, by ``id``, a tensor that is what
    ``param`` was.
    """
    slices.pop(param, None)
    if is_partitioned(param):
        with DisableTorchFunction():
            twin = nn.Parameter(param.data, param.requires_grad)
        twin.__class__ = type(param)  # type: ignore[assignment]
        vars(twin).update(vars(param))
        if former is not None:
            former[id(param)] = twin
        param.make_ordinary()
    if param.is_meta:
        stand_in = torch.empty((), dtype=param.dtype).expand(param.shape)
        if isinstance(param, nn.Parameter):
            stand_in = nn.Parameter(stand_in, param.requires_grad)
        if former is not None:
            former[id(param)] = stand_in
        swap_tensor(param, stand_in)
