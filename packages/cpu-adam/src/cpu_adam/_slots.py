"""Where one parameter's memory is: looked up once, checked cheaply at every step.

A step over many small parameters is bound by Python, not by memory. So a `Slot` remembers what was
verified (dtype, shape, strides, storage) together with the addresses it was verified for, and
`Slot.is_current` only compares those.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from cpu_adam._memory import BFLOAT16, FLOAT16, FLOAT32, ITEM_BYTES, NO_OUT, torch_address

__all__ = ["MASTER", "TYPES", "Slot", "local_of"]

TYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}

# Name of the fp32 copy that a 16-bit parameter is updated through.
MASTER = "master_weight"


def local_of(tensor: Tensor) -> Tensor:
    """The tensor whose memory this rank holds: a DTensor's local part, or the tensor itself."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return tensor
    dtensor: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    if isinstance(tensor, dtensor):
        local: Tensor = tensor.to_local()
        return local
    return tensor


def _check_state(name: str, state: Any, like: Tensor) -> Tensor:
    if not isinstance(state, Tensor):
        raise TypeError(f"state {name!r}: expected a tensor, got {type(state).__name__}")
    local = local_of(state)
    if not local.is_cpu or local.layout is not torch.strided:
        raise ValueError(f"state {name!r}: must be a dense CPU tensor, got {state.device}")
    if local.dtype is not torch.float32:
        raise TypeError(f"state {name!r}: dtype must be torch.float32, got {state.dtype}")
    if local.shape != like.shape or local.stride() != like.stride():
        raise ValueError(
            f"state {name!r}: must have the parameter's shape and strides "
            f"{tuple(like.shape)}, {like.stride()}; got {tuple(local.shape)}, {local.stride()}"
        )
    return local


def _check_step(step: Tensor) -> Tensor:
    if not step.is_cpu or step.dtype is not torch.float32 or step.numel() != 1:
        raise ValueError(f"state 'step': must be one fp32 number on the CPU, got {step!r}")
    return step


class Slot:
    """The memory of one parameter and of its state.

    Attributes:
        out_type: element type of the parameter if it is written as a copy of the master weight.
        local: the parameter, or the local part of a DTensor.
        numel: number of elements in it.
        step: the number of updates so far, 0-d fp32; counted up in memory, at ``step_address``.
    """

    __slots__ = (
        "_locals",
        "_state",
        "_stored",
        "addresses",
        "is_contiguous",
        "local",
        "numel",
        "out_type",
        "step",
        "step_address",
        "stride",
    )

    def __init__(self, param: Tensor, state: dict[str, Any]) -> None:
        local = local_of(param)
        if not local.is_cpu or local.layout is not torch.strided:
            raise ValueError(f"parameter: must be a dense CPU tensor, got one on {local.device}")
        kind = TYPES[local.dtype]
        is_master = kind == FLOAT32
        exp_avg = _check_state("exp_avg", state["exp_avg"], local)
        exp_avg_sq = _check_state("exp_avg_sq", state["exp_avg_sq"], local)
        master = local if is_master else _check_state(MASTER, state[MASTER], local)
        self._state = state
        self._stored = (state["exp_avg"], state["exp_avg_sq"], state.get(MASTER))
        self._locals = (master, exp_avg, exp_avg_sq)
        self.step = _check_step(state["step"])
        self.step_address = torch_address("step", self.step)
        self.local = local
        self.numel = local.numel()
        self.stride = local.stride()
        self.is_contiguous = local.is_contiguous()
        self.out_type = NO_OUT if is_master else kind
        # master, exp_avg, exp_avg_sq, out: the kernel's arguments besides the gradient
        self.addresses = (
            torch_address("parameter" if is_master else MASTER, master),
            torch_address("exp_avg", exp_avg),
            torch_address("exp_avg_sq", exp_avg_sq),
            0 if is_master else torch_address("parameter", local),
        )

    def is_current(self, param: Tensor, state: dict[str, Any]) -> bool:
        """Whether the parameter and its state are still what was verified."""
        local = param if type(param) is torch.nn.Parameter else local_of(param)
        master, exp_avg, exp_avg_sq = self._locals
        is_copy = self.out_type != NO_OUT
        stored_exp_avg, stored_exp_avg_sq, stored_master = self._stored
        return (
            state is self._state
            and state.get("exp_avg") is stored_exp_avg
            and state.get("exp_avg_sq") is stored_exp_avg_sq
            and state.get(MASTER) is stored_master
            and state.get("step") is self.step
            and self.step.data_ptr() == self.step_address
            and TYPES.get(local.dtype) == (self.out_type if is_copy else FLOAT32)
            and local.stride() == self.stride
            and local.numel() == self.numel
            and self.addresses
            == (
                master.data_ptr() if is_copy else local.data_ptr(),
                exp_avg.data_ptr(),
                exp_avg_sq.data_ptr(),
                local.data_ptr() if is_copy else 0,
            )
        )

    def grad_memory(self, grad: Tensor) -> tuple[Tensor, int, int]:
        """The gradient in the parameter's layout: a tensor to keep alive, its address, its type."""
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
        numel = grad.numel()
        if numel != self.numel:
            raise ValueError(f"gradient: has {numel} elements, its parameter {self.numel}")
        same_layout = grad.is_contiguous() if self.is_contiguous else grad.stride() == self.stride
        if not same_layout:
            grad = torch.empty_like(self.local, dtype=grad.dtype).copy_(grad)
        if type(grad) is not Tensor:
            return grad, torch_address("gradient", grad), kind
        # What torch_address does, without its cost: this is run for every gradient.
        address = grad.data_ptr()
        needed = (grad.storage_offset() + numel) * ITEM_BYTES[kind]
        if numel and (grad.untyped_storage().nbytes() < needed or address == 0):
            raise ValueError("gradient: its memory has been freed (or was never allocated)")
        return grad, address, kind
