"""Adam by one fused kernel: a single pass over host memory for each run of pieces.

ZeRO-Offload (arXiv 2101.06840, section 5) moves Adam to the host and makes it fast there. The
kernel reads the gradient in the dtype it left the device in, updates master weights and moments,
and writes the rounded parameters in the same pass, so that no separate unscale or cast pass reads
host memory again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim

from zero_offload.geometry import Geometry, plan_runs
from zero_offload.grads import GradLedger
from zero_offload.protocols import AdamKernel
from zero_offload.stepper import Chunk, MemoryStepper, check_num_steps

__all__ = ["KERNEL_DTYPES", "KernelStepper", "can_serve", "check_kernel_class"]

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class _Hyper:
    """What must be equal for two pieces to share a kernel call."""

    step: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    is_decoupled: bool
    is_maximized: bool


def check_kernel_class(optimizer_class: type[optim.Optimizer]) -> None:
    """ValueError unless the update wanted is torch's Adam or AdamW, which the kernel computes."""
    if optimizer_class not in (optim.Adam, optim.AdamW):
        raise ValueError(
            f"an adam_kernel computes torch.optim.Adam and AdamW, not "
            f"{optimizer_class.__qualname__}; pass adam_kernel=None"
        )


def can_serve(geometry: Geometry, groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the kernel's fp32, AMSGrad-free Adam gives what is asked; else torch computes it."""
    shards = all(tensor.dtype in KERNEL_DTYPES for _, tensor in geometry.shards)
    return shards and not any(group.get("amsgrad", False) for group in groups)


class KernelStepper(MemoryStepper):
    """Adam or AdamW over host memory, one ``kernel.adam_step`` call per run.

    Args:
        geometry: the flat space; shards of fp32, bf16 or fp16.
        kernel: see `AdamKernel`.
        optimizer_class: ``torch.optim.Adam`` or ``AdamW``.
        is_in_place: see `MemoryStepper`.
    """

    def __init__(
        self,
        geometry: Geometry,
        kernel: AdamKernel,
        optimizer_class: type[optim.Optimizer],
        *,
        is_in_place: bool,
    ) -> None:
        super().__init__(geometry, torch.device("cpu"), is_in_place=is_in_place)
        self._kernel = kernel
        self._is_decoupled = issubclass(optimizer_class, optim.AdamW)
        self._moments = {
            name: torch.zeros(geometry.numel, dtype=torch.float32, device="cpu")
            for name in _MOMENTS
        }

    def plan(
        self, active: Sequence[int], groups: Sequence[Mapping[str, Any]], grads: GradLedger
    ) -> list[Chunk]:
        """One chunk per run; a run also ends where the gradients' memory is not contiguous."""
        pieces = self.geometry.pieces
        keys = {i: self._hyper(groups[pieces[i].group], self.num_steps[i] + 1) for i in active}
        chunks = []
        for run in plan_runs(self.geometry, active, keys):
            grads.segments(run.start, run.stop)  # refuses a missing gradient before any update
            chunks.append(Chunk((run,), keys[run.pieces[0]]))
        return chunks

    def _hyper(self, group: Mapping[str, Any], step: int) -> _Hyper:
        if group.get("amsgrad", False):
            raise ValueError("amsgrad was switched on after construction; the kernel has none")
        beta1, beta2 = group["betas"]
        return _Hyper(
            step=step,
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            is_decoupled=bool(group.get("decoupled_weight_decay", self._is_decoupled)),
            is_maximized=bool(group.get("maximize", False)),
        )

    def update(
        self,
        chunk: Chunk,
        grads: GradLedger,
        grad_scale: float,
        out: Callable[[int, int], Tensor],
    ) -> None:
        """One kernel call, or one per stretch of gradient memory."""
        hyper: _Hyper = chunk.settings
        (run,) = chunk.runs
        rounded = None if self.is_in_place else out(run.start, run.stop)
        for a, b, grad in grads.segments(run.start, run.stop):
            self._kernel.adam_step(
                self.master(a, b),
                grad if grad.dtype in KERNEL_DTYPES else grad.float(),
                self._moments["exp_avg"][a:b],
                self._moments["exp_avg_sq"][a:b],
                step=hyper.step,
                lr=hyper.lr,
                beta1=hyper.beta1,
                beta2=hyper.beta2,
                eps=hyper.eps,
                weight_decay=hyper.weight_decay,
                adamw_mode=hyper.is_decoupled,
                grad_scale=-grad_scale if hyper.is_maximized else grad_scale,
                out=None if rounded is None else rounded[a - run.start : b - run.start],
            )

    def state_dtypes(self) -> Mapping[str, torch.dtype]:
        """The two moments, fp32."""
        return dict.fromkeys(_MOMENTS, torch.float32)

    def buffer(self, name: str, *, create: bool) -> Tensor | None:
        """The moment's flat buffer."""
        return self._moments[name]

    def read_scalars(self, piece: int) -> dict[str, float]:
        """The count, and the same as torch's Adam keeps it."""
        count = self.num_steps[piece]
        return {"num_steps": count, "step": float(count)} if count else {"num_steps": 0}

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        """Take the count; torch's ``step`` beside it says the same."""
        count = check_num_steps(scalars)
        unknown = sorted(set(scalars) - {"num_steps", "step"})
        if unknown:
            raise ValueError(f"Adam has no scalars {unknown}; the state is another optimizer's")
        if count == 0:
            self.clear(piece)
        self.num_steps[piece] = count
