"""States of a parameter: their creation at the first step, and their verified memory.

A `Slot` keeps what was verified (dtype, shape, strides, storage) together with the addresses it was
verified for. `cpu_adam._tables` compares them at every step.

[Note: extents]
A tensor's extent determines the memory that it may use: the address of its first element, dtype,
numel, storage offset, and the bytes of the storage. An address alone is not enough: a storage can
shrink in place, and the allocator reuses the address of a freed one for a smaller one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cpu_adam import _kernels
from cpu_adam._memory import BFLOAT16, FLOAT16, FLOAT32, NO_OUT, SPLIT, torch_address
from cpu_adam._scalars import finite_number

TYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}

# Name of the fp32 copy that a 16-bit parameter is updated through.
MASTER = "master_weight"

# Name of the int16 lower half of the master weight whose upper half is a bf16 parameter.
REMAINDER = "remainder"

# Names of the scales of 8-bit moments: fp32, one for each block of elements.
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")

# Types of the moments, by the name of their width.
STATE_DTYPES = {
    "float32": {"exp_avg": torch.float32, "exp_avg_sq": torch.float32},
    "bfloat16": {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16},
    "int8": {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8},
}

# The two ways to keep the master weight of a 16-bit parameter, and the name of its state.
MASTER_DTYPES = {"float32": MASTER, "split": REMAINDER}


def check_name(argument: str, name: Any, names: Iterable[str]) -> str:
    """Return ``name`` if it is one of ``names``.

    Raises:
        TypeError: it is no string.
        ValueError: it is none of them.
    """
    if not isinstance(name, str):
        raise TypeError(f"{argument}: expected a name, got {type(name).__name__}")
    if name not in names:
        raise ValueError(f"{argument}: must be one of {', '.join(names)}; got {name!r}")
    return name


def local_of(tensor: Tensor) -> Tensor:
    """Return a DTensor's local part, or any other tensor itself."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return tensor
    dtensor: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    if isinstance(tensor, dtensor):
        with torch.no_grad():
            local: Tensor = tensor.to_local()
        return local
    return tensor


def check_master(param: Tensor, master_dtype: str | None) -> None:
    """Refuse a parameter whose master weight cannot have the form ``master_dtype``."""
    if master_dtype == "split" and param.dtype is torch.float16:
        raise ValueError(
            "master_dtype: 'split' is for bf16 parameters, which are the upper half of an fp32 "
            "number; pass None or 'float32' for an fp16 parameter"
        )


def check_param(param: Tensor, master_dtype: str | None) -> None:
    """Refuse a parameter that cannot be updated."""
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
    """Create missing states, a master weight among them, and convert a step count of any type."""
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


Extents = list[tuple[Any, ...]]
"""Extents of several tensors: one column for each part of an extent."""

_dtype = attrgetter("dtype")


def extents_of(tensors: list[Tensor]) -> Extents:
    """Return the current extents of the tensors. See [Note: extents]."""
    return [
        tuple(map(Tensor.data_ptr, tensors)),
        tuple(map(_dtype, tensors)),
        tuple(map(Tensor.numel, tensors)),
        tuple(map(Tensor.storage_offset, tensors)),
        tuple(map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, tensors))),
    ]


def _extent_of(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(value for (value,) in extents_of([tensor]))


class Watched(NamedTuple):
    """One entry of a parameter's state, verified."""

    name: str
    value: Tensor | None  # None if there must be none
    part: Tensor  # its local tensor
    extent: tuple[Any, ...]  # of ``part``, when it was verified


def _check_tensor(name: str, state: Any) -> Tensor:
    if not isinstance(state, Tensor):
        raise TypeError(f"state {name!r}: expected a tensor, got {type(state).__name__}")
    return local_of(state)


def _check_state(name: str, state: Any, like: Tensor, dtype: torch.dtype) -> Tensor:
    local = _check_tensor(name, state)
    if not local.is_cpu or local.layout is not torch.strided:
        raise ValueError(f"state {name!r}: must be a dense CPU tensor, got {state.device}")
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


def _check_scale(name: str, state: Any, numel: int) -> Tensor:
    scale = _check_tensor(name, state)
    expected = (-(-numel // _kernels.BLOCK_NUMEL),)
    if not scale.is_cpu or scale.dtype is not torch.float32 or not scale.is_contiguous():
        raise ValueError(f"state {name!r}: must be contiguous fp32 numbers on the CPU")
    if tuple(scale.shape) != expected:
        raise ValueError(f"state {name!r}: must have shape {expected}, got {tuple(scale.shape)}")
    return scale


class Slot:
    """The memory of one parameter and of its state, verified.

    Attributes:
        param: the parameter.
        state: the dictionary with its state.
        settings: the group's ``state_dtype`` and ``master_dtype`` when it was verified.
        local: the parameter, or the local part of a DTensor.
        local_address: its address.
        extent: its extent; see [Note: extents].
        shape, stride, numel, is_contiguous: its form.
        watched: the verified entries of the state.
        out_type: element type of the parameter if it is written as a copy of the master weight.
        addresses: the kernel's arguments besides the gradient: master, states, out.
        step_address: address of the number of updates so far, in fp32.
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
            # A whole master that appears later takes the place of the split one.
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
        """Return the gradient in the parameter's layout, its address and its type.

        The tensor may be a copy, which the caller keeps alive.
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
        same_layout = grad.is_contiguous() if self.is_contiguous else grad.stride() == self.stride
        if not same_layout:
            grad = torch.empty_like(self.local, dtype=grad.dtype).copy_(grad)
        return grad, torch_address("gradient", grad), kind
