"""States of parameters: creation at the first step, and verification at every step.

With many small parameters, most of a step's time is spent in Python. Checks of every step therefore
work on columns of values, one per parameter or tensor, by `map` and similar functions.

[Note: checks of a step]
A `Slot` is the memory of one parameter and its state, fully verified when it is created. Later
steps compare only a `Snapshot` of slots: identities and extents of tensors, and parameters'
strides. A `Table` of slots has the kernel's arguments in columns, and checks the gradients, which
are new at every step. A `Roster` has a group's slots, a snapshot of all of them, and a table of
those with a gradient. It is reused until its `is_current` is false.

[Note: extents]
A tensor's extent identifies the memory that it may use: first element's address, dtype, numel,
storage offset, and bytes of the storage. An address alone is not enough. A storage can shrink in
place, and the allocator can reuse a freed address for a smaller storage.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from operator import add, attrgetter, floordiv, gt, is_, le
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cpu_adam import _kernels
from cpu_adam._memory import BFLOAT16, FLOAT16, FLOAT32, ITEM_BYTES, NO_OUT, SPLIT, torch_address
from cpu_adam._scalars import finite_number

TYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}

# State name of the fp32 master weight of a 16-bit parameter.
MASTER = "master_weight"

# State name of the int16 lower half of a master weight. The bf16 parameter is the upper half.
REMAINDER = "remainder"

# State names of the fp32 scales of 8-bit moments, one scale per block.
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")

# Dtypes of the moments for each ``state_dtype``.
STATE_DTYPES = {
    "float32": {"exp_avg": torch.float32, "exp_avg_sq": torch.float32},
    "bfloat16": {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16},
    "int8": {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8},
}

# State name for each format of a 16-bit parameter's master weight.
MASTER_DTYPES = {"float32": MASTER, "split": REMAINDER}


def check_name(argument: str, name: Any, names: Iterable[str]) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{argument}: expected a name, got {type(name).__name__}")
    if name not in names:
        raise ValueError(f"{argument}: must be one of {', '.join(names)}; got {name!r}")
    return name


def local_of(tensor: Tensor) -> Tensor:
    """Return a DTensor's local tensor, or any other tensor itself."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return tensor
    dtensor: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    if isinstance(tensor, dtensor):
        with torch.no_grad():
            local: Tensor = tensor.to_local()
        return local
    return tensor


def check_master(param: Tensor, master_dtype: str | None) -> None:
    """Raise ValueError if the parameter's master weight cannot have format ``master_dtype``."""
    if master_dtype == "split" and param.dtype is torch.float16:
        raise ValueError(
            "master_dtype: 'split' is for bf16 parameters, which are the upper half of an fp32 "
            "number; pass None or 'float32' for an fp16 parameter"
        )


def check_param(param: Tensor, master_dtype: str | None) -> None:
    """Raise ValueError or TypeError if the parameter cannot be updated."""
    if param.device.type != "cpu":
        raise ValueError(f"params: CPUAdam updates CPU parameters; got one on {param.device}")
    if param.layout is not torch.strided:
        raise ValueError(f"params: must be dense, got layout {param.layout}")
    if param.is_neg():
        raise ValueError("params: is a lazily negated view; pass param.resolve_neg()")
    if param.dtype not in TYPES:
        raise TypeError(f"params: dtype must be fp32, bf16 or fp16; got {param.dtype}")
    check_master(param, master_dtype)
    local = local_of(param)
    if not local.is_contiguous() and torch.empty_like(local).stride() != local.stride():
        raise ValueError(
            f"params: must fill its memory without gaps or overlap; got shape "
            f"{tuple(local.shape)} with strides {local.stride()}"
        )


def fill_state(
    param: Tensor, state: dict[str, Any], state_dtype: str, master_dtype: str | None
) -> None:
    """Create missing states and master weights, and make the step count an fp32 CPU tensor."""
    step = state.get("step", 0.0)
    if not isinstance(step, Tensor) or step.dtype is not torch.float32 or not step.is_cpu:
        number = finite_number("state 'step'", step)
        state["step"] = torch.tensor(number, dtype=torch.float32)
    for name, dtype in STATE_DTYPES[state_dtype].items():
        if name not in state:
            state[name] = torch.zeros_like(param, dtype=dtype)
    if state_dtype == "int8":
        num_blocks = -(-local_of(param).numel() // _kernels.BLOCK_NUMEL)
        for name in SCALES:
            if name not in state:
                state[name] = torch.zeros(num_blocks, dtype=torch.float32)
    if param.dtype is torch.float32:
        return
    is_bfloat16 = param.dtype is torch.bfloat16
    found = next((name for name in (MASTER, REMAINDER) if name in state), None)
    if found == MASTER or (found == REMAINDER and is_bfloat16):
        if master_dtype is not None and found != MASTER_DTYPES[master_dtype]:
            raise ValueError(
                f"state {found!r}: is not what master_dtype {master_dtype!r} of its group keeps; "
                "cpu_adam.convert_state changes the one into the other"
            )
        return
    default = "split" if is_bfloat16 and state_dtype != "float32" else "float32"
    if (master_dtype or default) == "split":
        state[REMAINDER] = torch.zeros_like(param, dtype=torch.int16)
    else:
        state[MASTER] = param.detach().to(torch.float32)


_dtype = attrgetter("dtype")


def _extents_of(tensors: list[Tensor]) -> list[tuple[Any, ...]]:
    """Return the tensors' extents, a column per property. See [Note: extents]."""
    return [
        tuple(map(Tensor.data_ptr, tensors)),
        tuple(map(_dtype, tensors)),
        tuple(map(Tensor.numel, tensors)),
        tuple(map(Tensor.storage_offset, tensors)),
        tuple(map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, tensors))),
    ]


def _extent_of(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(value for (value,) in _extents_of([tensor]))


class Watched(NamedTuple):
    """One verified entry of a parameter's state."""

    name: str
    value: Tensor | None  # None: the state must not have this entry
    part: Tensor  # local tensor of ``value``, or of the parameter if it is None
    extent: tuple[Any, ...]  # extent of ``part`` at verification


def _check_tensor(name: str, state: Any) -> Tensor:
    if not isinstance(state, Tensor):
        raise TypeError(f"state {name!r}: expected a tensor, got {type(state).__name__}")
    return local_of(state)


def _check_state(name: str, state: Any, like: Tensor, dtype: torch.dtype) -> Tensor:
    local = _check_tensor(name, state)
    if not local.is_cpu or local.layout is not torch.strided or local.is_neg():
        raise ValueError(f"state {name!r}: must be a dense CPU tensor and no lazily negated view")
    if local.dtype is not dtype:
        raise TypeError(
            f"state {name!r}: dtype must be {dtype}, got {state.dtype}; "
            "cpu_adam.convert_state changes the width of the moments"
        )
    if local.shape != like.shape or local.stride() != like.stride():
        raise ValueError(
            f"state {name!r}: must have the parameter's shape and strides "
            f"{tuple(like.shape)}, {like.stride()}; got {tuple(local.shape)}, {local.stride()}"
        )
    return local


def _check_scale(name: str, state: Tensor, numel: int) -> Tensor:
    _check_tensor(name, state)
    expected = (-(-numel // _kernels.BLOCK_NUMEL),)
    if not state.is_cpu or state.dtype is not torch.float32 or not state.is_contiguous():
        raise ValueError(f"state {name!r}: must be contiguous fp32 numbers on the CPU")
    if tuple(state.shape) != expected:
        raise ValueError(f"state {name!r}: must have shape {expected}, got {tuple(state.shape)}")
    return state  # a DTensor fails later, as it has no memory


class Slot:
    """Verified memory of one parameter and its state.

    Attributes:
        param: the parameter.
        state: dictionary with its state.
        settings: the group's (``state_dtype``, ``master_dtype``) at verification.
        local: the parameter, or the local tensor of a DTensor.
        local_address: address of ``local``.
        extent: extent of ``local``; see [Note: extents].
        shape, stride, numel, is_contiguous: layout of ``local``.
        watched: the verified entries of the state.
        out_type: element type of the kernel's ``out``, NO_OUT or SPLIT.
        addresses: master (split: parameter), states, and ``out``, the remainder (split) or 0.
        step_address: address of the fp32 number of updates so far.
    """

    def __init__(
        self, param: Tensor, state: dict[str, Any], settings: tuple[str, str | None]
    ) -> None:
        local = local_of(param)
        if not local.is_cpu or local.layout is not torch.strided:
            raise ValueError(f"parameter: must be a dense CPU tensor, got one on {local.device}")
        self.param, self.state, self.settings, self.local = param, state, settings, local
        self.shape = local.shape
        self.stride = local.stride()
        self.numel = local.numel()
        self.is_contiguous = local.is_contiguous()
        self.local_address = torch_address("parameter", local)
        self.extent = _extent_of(local)
        self.watched: list[Watched] = []
        state_dtype, _ = settings
        kind = TYPES[local.dtype]
        states = [
            self._watch(name, _check_state(name, state[name], local, dtype))
            for name, dtype in STATE_DTYPES[state_dtype].items()
        ]
        if state_dtype == "int8":
            scales = {name: _check_scale(name, state[name], self.numel) for name in SCALES}
            states += [self._watch(name, scale) for name, scale in scales.items()]
        if kind == FLOAT32:
            self.out_type = NO_OUT
            self.addresses = (self.local_address, *states, 0)
        elif kind == BFLOAT16 and MASTER not in state:
            self.out_type = SPLIT
            rest = _check_state(REMAINDER, state[REMAINDER], local, torch.int16)
            self.addresses = (self.local_address, *states, self._watch(REMAINDER, rest))
            # Watch for an fp32 master, which replaces the split one if it is added later.
            self.watched.append(Watched(MASTER, None, local, self.extent))
        else:
            self.out_type = kind
            master = _check_state(MASTER, state[MASTER], local, torch.float32)
            self.addresses = (self._watch(MASTER, master), *states, self.local_address)
        step = state["step"]
        if not step.is_cpu or step.dtype is not torch.float32 or step.numel() != 1:
            raise ValueError(f"state 'step': must be one fp32 number on the CPU, got {step!r}")
        self.step_address = self._watch("step", step)

    def _watch(self, name: str, part: Tensor) -> int:
        address = torch_address(name, part)
        self.watched.append(Watched(name, self.state[name], part, _extent_of(part)))
        return address

    def grad_memory(self, grad: Tensor) -> tuple[Tensor, int, int]:
        """Return the gradient in the parameter's layout, its address and its element type.

        The tensor may be a copy that the caller must keep alive.
        """
        grad = local_of(grad)
        if not grad.is_cpu:
            raise ValueError(f"gradient: must be in host memory, got a tensor on {grad.device}")
        if grad.layout is not torch.strided:
            raise TypeError(
                f"gradient: CPUAdam takes no sparse gradients, got layout {grad.layout}; "
                "build the embedding with sparse=False"
            )
        kind = TYPES.get(grad.dtype)
        if kind is None:
            raise TypeError(f"gradient: dtype must be fp32, bf16 or fp16, got {grad.dtype}")
        grad = grad.resolve_neg()
        if grad.numel() != self.numel:
            raise ValueError(f"gradient: has {grad.numel()} elements, its parameter {self.numel}")
        if not (grad.is_contiguous() if self.is_contiguous else grad.stride() == self.stride):
            grad = torch.empty_like(self.local, dtype=grad.dtype).copy_(grad)
        return grad, torch_address("gradient", grad), kind


States = Mapping[Tensor, dict[str, Any]]
Settings = tuple[str, str | None]

_kind = attrgetter("__class__", "dtype", "layout", "is_cpu")

# Kinds of gradients that `Table` checks in columns instead of one by one.
_PLAIN = frozenset((Tensor, dtype, torch.strided, True) for dtype in TYPES)


def _are_same(found: Iterable[object], expected: Sequence[object]) -> bool:
    """Compare by identity, because ``==`` compares tensors by element."""
    return all(map(is_, found, expected))


class Snapshot:
    """Identities, extents and strides of verified memory, for comparison at later steps."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._params = [slot.param for slot in slots]
        self._is_local = all(type(param) is torch.nn.Parameter for param in self._params)
        self._states = [slot.state for slot in slots]
        self._owners = [slot.state for slot in slots for _ in slot.watched]
        watched = [entry for slot in slots for entry in slot.watched]
        self._names, self._values, self._parts, extents = map(list, zip(*watched, strict=True))
        # Use the extents at verification, because the memory may have changed since.
        extents += [slot.extent for slot in slots]
        self._extents = list(zip(*extents, strict=True))
        self._strides = [slot.stride for slot in slots]

    def is_current(self, states: States) -> bool:
        """Return whether all are unchanged. ``states`` maps parameters to state dictionaries."""
        local = self._params if self._is_local else list(map(local_of, self._params))
        return (
            _are_same(map(states.__getitem__, self._params), self._states)
            and _are_same(map(dict.get, self._owners, self._names), self._values)
            and _extents_of(self._parts + local) == self._extents
            and list(map(Tensor.stride, local)) == self._strides
        )


class Table:
    """Kernel arguments of some parameters, in columns.

    Attributes:
        local: the parameters, or the local tensors of DTensors.
        masters, others: first column of `Slot.addresses`, and a list of the other columns.
        numels: numbers of elements.
        out_types: as `Slot.out_type`.
        step_addresses: as `Slot.step_address`.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self.local = [slot.local for slot in slots]
        self.masters, *self.others = map(list, zip(*(s.addresses for s in slots), strict=True))
        self.numels = [slot.numel for slot in slots]
        self.out_types = [slot.out_type for slot in slots]
        self.step_addresses = [slot.step_address for slot in slots]
        self._shapes = [slot.shape for slot in slots]
        self._strides = [slot.stride for slot in slots]
        self._is_contiguous = all(slot.is_contiguous for slot in slots)
        self._num_empty = self.numels.count(0)

    def gradient_memory(self, grads: list[Tensor]) -> tuple[list[Tensor], list[int], list[int]]:
        """Return the gradients in their parameters' layout, their addresses and element types."""
        grads = [grad if type(grad) is Tensor else local_of(grad) for grad in grads]
        if _PLAIN.issuperset(map(_kind, grads)):
            types = list(map(TYPES.__getitem__, map(_dtype, grads)))
            addresses = list(map(Tensor.data_ptr, grads))
            if self._are_ready(grads, types, addresses):
                return grads, addresses, types
        with torch.no_grad():
            found = [slot.grad_memory(grad) for slot, grad in zip(self._slots, grads, strict=True)]
        return [grad for grad, _, _ in found], [at for _, at, _ in found], [t for *_, t in found]

    def _are_ready(self, grads: list[Tensor], types: list[int], addresses: list[int]) -> bool:
        """Return whether no gradient needs a conversion or an individual error message."""
        if list(map(Tensor.numel, grads)) != self.numels:
            return False
        if self._is_contiguous:
            are_laid_out = all(map(Tensor.is_contiguous, grads))
        else:
            are_laid_out = (
                list(map(Tensor.stride, grads)) == self._strides
                and list(map(attrgetter("shape"), grads)) == self._shapes
            )
        if not are_laid_out or any(map(Tensor.is_neg, grads)):
            return False
        # A storage can be freed while its tensor exists.
        stops = map(add, map(Tensor.storage_offset, grads), self.numels)
        sizes = map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, grads))
        are_inside = map(le, stops, map(floordiv, sizes, map(ITEM_BYTES.__getitem__, types)))
        return addresses.count(0) == self._num_empty and all(are_inside)


class Roster:
    """The parameters of a group, and their slots. Without a gradient a parameter may lack a slot.

    Creation fills the states of parameters that have a gradient, and verifies them. Unchanged slots
    of ``known``, the previous roster, are reused.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        settings: Settings,
        states: States,
        has_grad: Sequence[bool],
        known: Roster | None,
    ) -> None:
        self._params = list(params)
        self._settings = settings
        self._slots: list[Slot | None] = []
        old = {} if known is None else {s.param: s for s in known._slots if s is not None}
        for param, is_wanted in zip(params, has_grad, strict=True):
            slot = old.get(param)
            # Check the address first: it is the most frequent change and cheap to detect.
            if not (
                slot is not None
                and slot.settings == settings
                and local_of(param).data_ptr() == slot.local_address
                and Snapshot([slot]).is_current(states)
            ):
                slot = None
                if is_wanted:
                    check_param(param, settings[1])
                    fill_state(param, states[param], *settings)
                    slot = Slot(param, states[param], settings)
            self._slots.append(slot)
        self._has_slot = [slot is not None for slot in self._slots]
        self._snapshot = Snapshot([slot for slot in self._slots if slot is not None])
        self._table: Table | None = None
        self._has_row: list[bool] = []

    def is_current(
        self, params: Sequence[Tensor], settings: Settings, states: States, has_grad: Sequence[bool]
    ) -> bool:
        """Return whether arguments and memory are as before, and every gradient has a slot."""
        return (
            settings == self._settings
            and len(params) == len(self._params)
            and _are_same(params, self._params)
            and not any(map(gt, has_grad, self._has_slot))
            and self._snapshot.is_current(states)
        )

    def table_of(self, has_grad: list[bool]) -> Table:
        """Return the table of parameters with a gradient, reused if they are the last step's."""
        if self._table is None or self._has_row != has_grad:
            slots = compress(self._slots, has_grad)
            self._table = Table([slot for slot in slots if slot is not None])
            self._has_row = has_grad
        return self._table
