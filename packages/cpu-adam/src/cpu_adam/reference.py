"""Reference definition of the kernels in NumPy. Every compiled kernel computes the same bits.

[Note: the order of operations]
Adam with fp32 states, Adagrad and SGD have the formulas of torch.optim's for-loop
(``foreach=False``). Each operation is rounded to fp32. On CPUs with FMA, torch's lerp, addcmul and
add(alpha=) round a multiplication and addition once, as `fma` below does. Only the square root
differs: torch's, on x86, is off by 1 ulp for about one number in six. Here it is correctly rounded,
as in torch's fused Adam.

Sign and payload of NaNs depend on the CPU, so all NaNs count as equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from cpu_adam._scalars import (
    AdamHyper,
    CompactAdamScalars,
    adagrad_scalars,
    adam_scalars,
    check_seed,
    compact_adam_scalars,
    lion_scalars,
    random_key,
    sgd_scalars,
)

BLOCK_NUMEL = 128
CHUNK_NUMEL = 32 * 1024

# `_compress` maps 16128 to 127. Code 255 of a root means 1.0, and code 0 has bits `_ROOT_BASE`.
_EXP_AVG_UNIT = np.float32(1) / np.float32(16128)
_EXP_AVG_TOP = np.float32(16127)  # slightly less than 16128: its code rounds to 127
_ROOT_SHIFT = np.uint32(19)
_ROOT_BASE = np.uint32(0x3F800000 - (255 << 19))
_HALF_OF_ONE = np.uint32(0x3F800000 // 2)

Array = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]
Gradient = Array | list[Array] | tuple[Array, ...]


def fma(a: Any, b: Any, c: Any) -> Float32Array:
    """Return ``a * b + c`` of fp32 values, rounded once.

    The product is exact in double precision. The sum is rounded to odd, which makes the final
    rounding to fp32 correct (Boldo and Melquiond, 2008). Knuth's TwoSum computes the sum's error.
    """
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    addend = np.asarray(c, np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    is_inexact = (error < 0) | (error > 0)  # False for NaN, the error of an infinite sum
    towards_error = np.where((error > 0) == (total > 0), 1, -1)
    odd = bits + np.where(is_inexact & (bits & 1 == 0), towards_error, 0)
    return odd.view(np.float64).astype(np.float32)


def bfloat16_to_float32(bits: npt.NDArray[np.uint16]) -> Float32Array:
    """Convert bf16 values, given as uint16 bits, to fp32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(values: Float32Array) -> npt.NDArray[np.uint16]:
    """Round fp32 values to the nearest bf16, ties to even, as uint16 bits. NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> 16 & 1)
    quiet = bits | np.uint32(0x00400000)
    return (np.where(np.isnan(values), quiet, rounded) >> 16).astype(np.uint16)


def adam_step(
    master: Float32Array,
    grad: Gradient,
    exp_avg: Float32Array,
    exp_avg_sq: Float32Array,
    *,
    out: Array | None = None,
    **hyper: Unpack[AdamHyper],
) -> None:
    """Compute `cpu_adam.adam_step` slowly, on NumPy arrays of one shape.

    Arguments are the same, without ``copies`` and ``num_threads``, but bf16 arrays are ``uint16``.
    """
    scale, decay, l2, weight1, b2, weight2, correction2_sqrt, epsilon, neg_step_size = _in_float32(
        adam_scalars(**hyper)
    )
    with np.errstate(all="ignore"):
        g = _widen(grad) * scale
        p: Any = master
        if l2 != 0:
            g = fma(p, l2, g)
        else:
            p = p * decay
        # torch's lerp adds to the nearer of its two ends
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
        _write_out(out, p)


def _widen(values: Gradient) -> Float32Array:
    """Convert 16-bit values (uint16: bf16) to fp32. Add several gradients in order, in fp32."""
    if isinstance(values, list | tuple):
        total = _widen(values[0])
        for other in values[1:]:
            total = total + _widen(other)
        return total
    if values.dtype == np.uint16:
        return bfloat16_to_float32(values)
    return values.astype(np.float32)


def _write_out(out: Array | None, values: Array) -> None:
    if out is not None:
        is_bfloat16 = out.dtype == np.uint16
        out[...] = float32_to_bfloat16(values) if is_bfloat16 else values.astype(out.dtype)


def combine_master(param: npt.NDArray[np.uint16], remainder: npt.NDArray[np.int16]) -> Float32Array:
    """Return the fp32 master weights of bf16 parameters and their remainders.

    As integers, a master weight is the parameter shifted left by 16 bits, plus the remainder. A
    parameter of zero gives zero, whatever its remainder.
    """
    upper = param.astype(np.uint32) << 16
    sums = upper + remainder.astype(np.int32).view(np.uint32)
    bits = np.where(upper & np.uint32(0x7FFFFFFF), sums, upper)
    return bits.view(np.float32)


def split_master(master: Float32Array) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int16]]:
    """Split master weights into the nearest bf16 parameters and the remainders.

    A tie rounds to the greater magnitude. The remainder is then the lower half of the master's
    bits, and `combine_master` restores the master bit by bit. Exceptions: a NaN gives some NaN, and
    a magnitude below 2**-134 (4.6e-41) gives zero.
    """
    bits = master.view(np.uint32)
    quiet = bits | np.uint32(0x00400000)
    rounded = np.where(np.isnan(master), quiet, bits + np.uint32(0x8000))
    return (rounded >> 16).astype(np.uint16), bits.astype(np.uint16).view(np.int16)


def adam_step_split(
    param: npt.NDArray[np.uint16],
    remainder: npt.NDArray[np.int16],
    grad: Gradient,
    exp_avg: Float32Array,
    exp_avg_sq: Float32Array,
    **hyper: Any,
) -> None:
    """Compute `cpu_adam.adam_step_split`, with uint16 for bf16."""
    master = combine_master(param, remainder)
    adam_step(master, grad, exp_avg, exp_avg_sq, **hyper)
    param[...], remainder[...] = split_master(master)


def _compact_adam(
    param: Array,
    remainder: Array | None,
    out: Array | None,
    grad: Gradient,
    moments: tuple[Any, Any],
    f: Any,
) -> tuple[Float32Array, Float32Array, Float32Array]:
    """Update a master weight as Adam with 8- and 16-bit states does.

    ``f`` has the scalars in fp32. ``moments`` are already multiplied by beta1 and beta2. Returns
    the new moments and the square root of the second.
    """
    p: Any = param.astype(np.float32) if remainder is None else combine_master(param, remainder)
    g: Any = _widen(grad)
    weight, root_weight = f.one_minus_beta1, f.one_minus_beta2_sqrt
    if f.l2 == 0:  # apply grad_scale through the weights of the moments
        weight, root_weight = weight * f.grad_scale, root_weight * f.grad_scale
    else:
        g = fma(p, f.l2, g * f.grad_scale)
    m = fma(weight, g, moments[0])
    part = root_weight * g
    v = fma(part, part, moments[1])
    root = np.sqrt(v)
    p = fma(p, f.decay, m / fma(root, f.denominator_scale, f.denominator_offset))
    if remainder is None:
        param[...] = p
        _write_out(out, p)
    else:
        param[...], remainder[...] = split_master(p)
    return m, v, root


def _in_float32(scalars: Iterable[float]) -> list[Any]:
    return [np.float32(value) for value in scalars]


def _in_blocks(values: Array) -> Array:
    """Reshape to rows of BLOCK_NUMEL elements, padding the last row with zeros."""
    return np.pad(values.reshape(-1), (0, -values.size % BLOCK_NUMEL)).reshape(-1, BLOCK_NUMEL)


def _compress(values: Float32Array) -> Float32Array:
    """Approximate the square root of positive normal numbers. Zero gives 1.5 * 2**-64.

    The result has half the exponent and is linear between powers of two. It is within 6.1% of the
    root and monotone. `_expand` inverts it up to the lowest bit.
    """
    return ((values.view(np.uint32) >> 1) + _HALF_OF_ONE).view(np.float32)


def _expand(values: Float32Array) -> Float32Array:
    """Invert `_compress` up to the lowest bit. Zero gives zero."""
    bits: Array = values.view(np.int32) - np.int32(_HALF_OF_ONE)
    expanded: Float32Array = (np.maximum(bits, 0) << 1).view(np.float32)
    return expanded


def _times_units(values: Array, units: Float32Array, codes: Array) -> Float32Array:
    """Multiply each row of ``values`` by its unit and return the result in ``codes``'s shape."""
    return (units[:, None] * values).reshape(-1)[: codes.size].reshape(codes.shape)


def dequantize_exp_avg(
    codes: npt.NDArray[np.int8], scales: Float32Array, decay: Any = 1
) -> Float32Array:
    """Decode the first moment, multiplied by ``decay``."""
    units = (scales * _EXP_AVG_UNIT) * np.float32(decay)
    magnitudes = _expand(np.abs(_in_blocks(codes).astype(np.float32)))
    return np.copysign(_times_units(magnitudes, units, codes), codes.astype(np.float32))


def dequantize_exp_avg_sq_root(
    codes: npt.NDArray[np.uint8], scales: Float32Array, decay: Any = 1
) -> Float32Array:
    """Decode the square root of the second moment, multiplied by ``decay``."""
    bits = (_in_blocks(codes).astype(np.uint32) << _ROOT_SHIFT) + _ROOT_BASE
    return _times_units(bits.view(np.float32), scales * np.float32(decay), codes)


def _block_scales(magnitudes: Float32Array, top: np.float32) -> tuple[Float32Array, Float32Array]:
    """Return each row's scale, and the factor that maps its maximum to ``top``. Tiny rows get 0."""
    largest = magnitudes.max(axis=1)  # NaN if the row contains NaN
    is_zero = largest < np.float32(2.0**-100)
    scale = np.where(is_zero, np.float32(0), largest).astype(np.float32)
    inverse = np.where(is_zero, np.float32(0), top / largest).astype(np.float32)
    return scale, inverse


def quantize_moments(
    exp_avg: Float32Array, exp_avg_sq_root: Float32Array
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.uint8], Float32Array, Float32Array]:
    """Encode the first moment and the square root of the second in 8 bits, with scales.

    Each block of 128 elements has a scale per moment: its maximum magnitude. A code of the first
    moment is ``_compress(|value| * 16127 / scale)``, rounded to nearest, with the value's sign. A
    code of a root is ``root / scale`` rounded to 5 significant bits, 16 codes per power of two.
    Code 255 means 1, and code 0 means ``17 / 2**20`` or less. No code of a root means zero, because
    a zero root would make the update explode. A block whose maximum is below ``2**-100`` is stored
    as zero. A block with a non-finite element in either moment gets codes of 0 and scales of NaN.
    """
    shape, numel = exp_avg.shape, exp_avg.size
    with np.errstate(all="ignore"):
        m, root = _in_blocks(exp_avg), np.abs(_in_blocks(exp_avg_sq_root))
        m_scale, m_inverse = _block_scales(np.abs(m), _EXP_AVG_TOP)
        root_scale, root_inverse = _block_scales(root, np.float32(1))
        is_lost = ~(np.isfinite(m_scale) & np.isfinite(root_scale))
        m_codes = np.copysign(_compress(np.abs(m) * m_inverse[:, None]), m)
        root_bits = np.maximum((root * root_inverse[:, None]).view(np.uint32), _ROOT_BASE)
        root_codes = (root_bits - _ROOT_BASE + np.uint32(1 << 18)) >> _ROOT_SHIFT
        m_codes[is_lost] = root_codes[is_lost] = 0
        m_scale[is_lost] = root_scale[is_lost] = np.nan
        m_int = np.rint(m_codes).astype(np.int8).reshape(-1)[:numel].reshape(shape)
        root_int = root_codes.astype(np.uint8).reshape(-1)[:numel].reshape(shape)
    return m_int, root_int, m_scale, root_scale


def adam_step_8bit(
    param: Array,
    grad: Gradient,
    exp_avg: npt.NDArray[np.int8],
    exp_avg_sq: npt.NDArray[np.uint8],
    exp_avg_scale: Float32Array,
    exp_avg_sq_scale: Float32Array,
    *,
    remainder: npt.NDArray[np.int16] | None = None,
    out: Array | None = None,
    **hyper: Any,
) -> None:
    """Compute `cpu_adam.adam_step_8bit`, with uint16 for bf16."""
    f: Any = CompactAdamScalars(*_in_float32(compact_adam_scalars(**hyper)))
    with np.errstate(all="ignore"):
        m = dequantize_exp_avg(exp_avg, exp_avg_scale, f.beta1)
        root = dequantize_exp_avg_sq_root(exp_avg_sq, exp_avg_sq_scale, np.sqrt(f.beta2))
        m, _, root = _compact_adam(param, remainder, out, grad, (m, root * root), f)
    codes = quantize_moments(m, root)
    exp_avg[...], exp_avg_sq[...], exp_avg_scale[...], exp_avg_sq_scale[...] = codes


def random_bits(numel: int, key: int, stream: int = 0) -> npt.NDArray[np.uint32]:
    """Return 32 random bits for each of ``numel`` elements, by hashing a counter.

    The hash is two rounds of multiply and xor-shift, with MurmurHash3's final multipliers.
    """
    position = np.arange(numel, dtype=np.uint64)
    low = (position & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    high = (position >> np.uint64(32)).astype(np.uint32)
    key0 = np.uint32((key + stream * 0x85EBCA77) & 0xFFFFFFFF)
    key1 = np.uint32(((key >> 32) + stream * 0x9E3779B1) & 0xFFFFFFFF)
    with np.errstate(over="ignore"):
        x: Any = low + key0
        x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
        x = x ^ (key1 ^ (high * np.uint32(0x9E3779B9)))
        x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    random: npt.NDArray[np.uint32] = x ^ (x >> 16)
    return random


def round_stochastically(
    values: Float32Array, random16: npt.NDArray[np.uint32]
) -> npt.NDArray[np.uint16]:
    """Round to an adjacent bf16, as bits. ``random16`` is uniform below ``2**16``.

    The probability of each neighbor is proportional to the distance from the other one. Infinities
    and NaNs are preserved.
    """
    bits = values.view(np.uint32)
    quiet = bits | np.uint32(0x00400000)
    return (np.where(np.isnan(values), quiet, bits + random16) >> 16).astype(np.uint16)


def adam_step_bf16(
    param: Array,
    grad: Gradient,
    exp_avg: npt.NDArray[np.uint16],
    exp_avg_sq: npt.NDArray[np.uint16],
    *,
    seed: int = 0,
    stream: int = 0,
    remainder: npt.NDArray[np.int16] | None = None,
    out: Array | None = None,
    **hyper: Any,
) -> None:
    """Compute `cpu_adam.adam_step_bf16`, with uint16 for bf16."""
    f: Any = CompactAdamScalars(*_in_float32(compact_adam_scalars(**hyper)))
    key = random_key(check_seed(seed), hyper["step"])
    random: Any = random_bits(param.size, key, stream).reshape(param.shape)
    with np.errstate(all="ignore"):
        old = bfloat16_to_float32(exp_avg), bfloat16_to_float32(exp_avg_sq)
        moments = f.beta1 * old[0], f.beta2 * old[1]
        m, v, _ = _compact_adam(param, remainder, out, grad, moments, f)
        exp_avg[...] = round_stochastically(m, random & np.uint32(0xFFFF))
        exp_avg_sq[...] = round_stochastically(v, random >> 16)


def adagrad_step(
    master: Float32Array,
    grad: Gradient,
    state_sum: Float32Array,
    *,
    out: Array | None = None,
    **hyper: Any,
) -> None:
    """Compute `cpu_adam.adagrad_step`, with uint16 for bf16."""
    scale, l2, epsilon, neg_step_size = _in_float32(adagrad_scalars(**hyper))
    with np.errstate(all="ignore"):
        g = fma(master, l2, _widen(grad) * scale)
        total = fma(g, g, state_sum)
        p = master + (neg_step_size * g) / (np.sqrt(total) + epsilon)
        master[...] = p
        state_sum[...] = total
        _write_out(out, p)


def lion_step(
    master: Float32Array,
    grad: Gradient,
    exp_avg: Float32Array,
    *,
    out: Array | None = None,
    **hyper: Any,
) -> None:
    """Compute `cpu_adam.lion_step`, with uint16 for bf16."""
    scale, decay, b1, weight1, b2, weight2, neg_lr = _in_float32(lion_scalars(**hyper))
    with np.errstate(all="ignore"):
        g = _widen(grad) * scale
        direction = fma(weight1, g, b1 * exp_avg)
        # adding 0 turns a step of -0 into 0
        p = master * decay + (neg_lr * np.sign(direction) + np.float32(0))
        exp_avg[...] = fma(weight2, g, b2 * exp_avg)
        master[...] = p
        _write_out(out, p)


def sgd_step(
    master: Float32Array,
    grad: Gradient,
    momentum_buffer: Float32Array | None = None,
    *,
    nesterov: bool = False,
    out: Array | None = None,
    **hyper: Any,
) -> None:
    """Compute `cpu_adam.sgd_step`, with uint16 for bf16."""
    *scalars, _ = sgd_scalars(nesterov=nesterov, **hyper)
    scale, l2, mu, buffer_decay, grad_weight, neg_lr = _in_float32(scalars)
    with np.errstate(all="ignore"):
        direction = g = fma(master, l2, _widen(grad) * scale)
        if momentum_buffer is not None:
            direction = fma(grad_weight, g, momentum_buffer * buffer_decay)
            momentum_buffer[...] = direction
            if nesterov:
                direction = fma(mu, direction, g)
        p = fma(neg_lr, direction, master)
        master[...] = p
        _write_out(out, p)


def grad_norm_sq(grad: Gradient, *, grad_scale: float = 1.0) -> tuple[float, bool]:
    """Compute `cpu_adam.grad_norm_sq`, with uint16 for bf16.

    Within a chunk, sum i of 16 fp64 sums adds every 16th element from i on. The second half of the
    sums is added to the first until one is left. Chunks are added in order.
    """
    total = 0.0
    values = _widen(grad).reshape(-1).astype(np.float64)
    with np.errstate(all="ignore"):
        for start in range(0, values.size, CHUNK_NUMEL):
            chunk = values[start : start + CHUNK_NUMEL]
            rows = np.pad(chunk, (0, -chunk.size % 16)).reshape(-1, 16)
            sums = np.cumsum(rows * rows, axis=0)[-1]
            while sums.size > 1:
                sums = sums[: sums.size // 2] + sums[sums.size // 2 :]
            total += float(sums[0])
    return total * (float(grad_scale) * float(grad_scale)), bool(np.isfinite(total))
