"""`adam_step`: one Adam update of flat memory, for training loops that keep their own state."""

from __future__ import annotations

import sys
from typing import Any

from cpu_adam import _kernels
from cpu_adam._isa import active_isa_index
from cpu_adam._memory import BFLOAT16, FLOAT16, FLOAT32, NO_OUT, Block, check_disjoint, describe
from cpu_adam._scalars import adam_scalars
from cpu_adam._threads import resolve_num_threads

__all__ = ["adam_step"]

_ONLY_FLOAT32 = (FLOAT32,)
_ANY_FLOAT = (FLOAT32, BFLOAT16, FLOAT16)


def adam_step(
    master: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    adamw_mode: bool = True,
    bias_correction: bool = True,
    grad_scale: float = 1.0,
    out: Any = None,
    num_threads: int | None = None,
) -> None:
    """Apply one Adam update in place, reading and writing each array once.

    Adam: Kingma and Ba, 2015, algorithm 1. AdamW: Loshchilov and Hutter, 2019, algorithm 2.
    Every argument may be a torch tensor, a NumPy array, or anything in host memory with
    ``__dlpack__``; all have one shape and are contiguous. Autograd does not see the update. The
    result for an element does not depend on the instruction set, the thread count, or its place.

    Args:
        master: fp32 weights; updated.
        grad: gradient in fp32, bf16 or fp16; unchanged.
        exp_avg: fp32 first moment; updated.
        exp_avg_sq: fp32 second moment; updated.
        step: number of this update, from 1.
        lr: learning rate, not negative.
        beta1: decay of ``exp_avg``, in [0, 1).
        beta2: decay of ``exp_avg_sq``, in [0, 1).
        eps: added to the denominator, not negative.
        weight_decay: decoupled (``adamw_mode``) or L2, not negative.
        adamw_mode: whether weight decay is decoupled from the gradient.
        bias_correction: divide the moments by ``1 - beta ** step``.
        grad_scale: factor on the gradient (unscale and clip in one), applied in fp32.
        out: fp32, bf16 or fp16; receives the new master weights, rounded to nearest even.
        num_threads: how many threads may work; None for torch's count if torch is loaded, else
            the number of CPUs that this process may use.

    Raises:
        TypeError: an argument of the wrong kind or dtype, by name.
        ValueError: wrong device, shape, layout or range; read-only, freed or overlapping memory;
            a number that is not finite. Nothing has been touched in either case.
    """
    scalars = adam_scalars(
        step=step,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        adamw_mode=adamw_mode,
        bias_correction=bias_correction,
        grad_scale=grad_scale,
    )
    threads = resolve_num_threads(num_threads)
    written = {
        "master": describe("master", master, is_written=True, types=_ONLY_FLOAT32),
        "exp_avg": describe("exp_avg", exp_avg, is_written=True, types=_ONLY_FLOAT32),
        "exp_avg_sq": describe("exp_avg_sq", exp_avg_sq, is_written=True, types=_ONLY_FLOAT32),
    }
    read = {"grad": describe("grad", grad, is_written=False, types=_ANY_FLOAT)}
    if out is not None:
        written["out"] = describe("out", out, is_written=True, types=_ANY_FLOAT)
    _check_shapes(written | read)
    check_disjoint(written, read)
    first = written["master"]
    target = written.get("out")
    _kernels.adam(
        active_isa_index(),
        read["grad"].type,
        NO_OUT if target is None else target.type,
        [
            first.address,
            read["grad"].address,
            written["exp_avg"].address,
            written["exp_avg_sq"].address,
            0 if target is None else target.address,
            first.numel,
        ],
        scalars,
        threads,
    )
    _tell_autograd(written)


def _check_shapes(blocks: dict[str, Block]) -> None:
    shape = blocks["master"].shape
    for name, block in blocks.items():
        if block.shape != shape:
            raise ValueError(f"{name}: must have master's shape {shape}, got {block.shape}")


def _tell_autograd(written: dict[str, Block]) -> None:
    """Let autograd notice that saved tensors changed, as torch's own in-place functions do."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "autograd"):
        return
    for block in written.values():
        if isinstance(block.owner, torch.Tensor):
            torch.autograd.graph.increment_version(block.owner)
