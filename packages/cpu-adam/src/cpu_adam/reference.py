"""The kernels' definition, in plain NumPy: every compiled kernel gives these bits.

[Note: the order of operations]
The formulas are those of torch.optim's for-loop (``foreach=False``), operation by operation, each
rounded to fp32. On CPUs with FMA, torch's lerp, addcmul and add(alpha=) round once where they
multiply and add; the calls of `fma` below are those places. One operation differs: torch's
square root on x86 comes from a math library that is 1 ulp off for about one number in six; here it
is correctly rounded, as IEEE 754 asks and as torch's fused Adam does it.

NaNs are equal whatever their sign and payload: those depend on the CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cpu_adam._scalars import adam_scalars

__all__ = ["adam_step", "bfloat16_to_float32", "float32_to_bfloat16", "fma"]

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]


def fma(a: Any, b: Any, c: Any) -> Float32Array:
    """``a * b + c`` of fp32 values, rounded once.

    The product is exact in double precision. The sum is rounded to odd, so that rounding it to
    fp32 gives the right result (Boldo and Melquiond, 2008); the sum's error is Knuth's TwoSum.
    """
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    addend = np.asarray(c, np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    is_inexact = (error < 0) | (error > 0)  # not so for NaN, the error of an infinite sum
    towards_error = np.where((error > 0) == (total > 0), 1, -1)
    odd = bits + np.where(is_inexact & (bits & 1 == 0), towards_error, 0)
    return odd.view(np.float64).astype(np.float32)


def bfloat16_to_float32(bits: npt.NDArray[np.uint16]) -> Float32Array:
    """bf16 values, given as their 16 bits, in fp32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: Float32Array) -> npt.NDArray[np.uint16]:
    """fp32 values rounded to the nearest bf16, ties to even; as 16 bits. NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> 16 & 1)
    quiet = bits | np.uint32(0x00400000)
    return (np.where(np.isnan(values), quiet, rounded) >> 16).astype(np.uint16)


def adam_step(
    master: Float32Array,
    grad: Array,
    exp_avg: Float32Array,
    exp_avg_sq: Float32Array,
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
    out: Array | None = None,
) -> None:
    """What `cpu_adam.adam_step` computes, on NumPy arrays of one shape.

    Args as there, but bf16 arrays (``grad``, ``out``) are given as ``uint16``. Slow.
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
    (scale, decay, l2, weight1, b2, weight2, correction2_sqrt, epsilon, neg_step_size) = (
        np.float32(value) for value in scalars
    )
    with np.errstate(all="ignore"):
        g = bfloat16_to_float32(grad) if grad.dtype == np.uint16 else grad.astype(np.float32)
        g = g * scale
        p: Any = master
        if l2 != 0:
            g = fma(p, l2, g)
        else:
            p = p * decay
        # lerp, from the nearer end
        if abs(weight1) < np.float32(0.5):
            m = fma(weight1, g - exp_avg, exp_avg)
        else:
            m = fma(weight1 - np.float32(1), g - exp_avg, g)
        v = fma(weight2 * g, g, exp_avg_sq * b2)
        denominator = np.sqrt(v) / correction2_sqrt + epsilon
        p = p + (neg_step_size * m) / denominator
        master[...] = p
        exp_avg[...] = m
        exp_avg_sq[...] = v
        if out is not None:
            out[...] = float32_to_bfloat16(p) if out.dtype == np.uint16 else p.astype(out.dtype)
