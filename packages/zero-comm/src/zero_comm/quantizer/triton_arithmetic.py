"""Codes and scales in Triton: the formulas of `block_format`, bit for bit.

A **tile** is fp32 [blocks, columns], one block per row, with zeros in columns beyond the block
size. Results must be bit-identical on every GPU and in Triton's interpreter:

- Division is `tl.div_rn`, because ``/`` may be approximate. Fused multiply-add is disabled.
- The bits of magnitudes, as integers, reveal non-finite blocks. A float maximum may drop NaN.
- Adding ``1.5 * 2**23`` rounds to an integer, because the last bit of the sum is then worth one.
  The low bits of the sum are the integer, without a conversion instruction.
- bf16 and fp8 are converted by integer arithmetic, because not every GPU supports them.
"""

# No `from __future__ import annotations`: Triton reads the annotations of the kernels.
import triton
import triton.language as tl


@triton.jit
def rotate(x: tl.tensor, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr) -> tl.tensor:
    """Multiply groups of 64 elements of a tile by the Hadamard matrix. See [Note: rotation]."""
    NUMEL: tl.constexpr = BLOCKS * COLUMNS
    x = x * 0.125
    for stage in tl.static_range(6):
        pairs = tl.reshape(x, [NUMEL // (2 << stage), 2, 1 << stage])
        # Each element needs its partner: the pair's sum minus the element, as integers that wrap.
        # A reduction over two lanes is a register shuffle and needs no memory.
        bits = pairs.to(tl.int32, bitcast=True)
        other = (tl.sum(bits, axis=1, keep_dims=True) - bits).to(tl.float32, bitcast=True)
        is_second = tl.arange(0, 2)[None, :, None] == 1
        x = tl.where(is_second, other - pairs, pairs + other)
    return tl.reshape(x, [BLOCKS, COLUMNS])


@triton.jit
def uniform(index: tl.tensor, seed: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Return ``u`` of [Note: stochastic rounding] for uint32 indices of a row's elements."""
    row_seed = seed.to(tl.uint32) + row.to(tl.uint32) * 0x9E3779B9
    h = _mix(index + _mix(row_seed))
    return (h >> 8).to(tl.float32) * (2.0**-24)


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _integer(v: tl.tensor) -> tl.tensor:
    """Round fp32 of magnitude below 2**22 to the nearest int32, ties to even."""
    return (v + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def _round(v: tl.tensor, noise: tl.tensor, IS_STOCHASTIC: tl.constexpr) -> tl.tensor:
    if IS_STOCHASTIC:  # not tl.floor, which rounds negative subnormals to zero on some GPUs
        sum = v + noise
        nearest = _integer(sum)
        return tl.where(nearest.to(tl.float32) > sum, nearest - 1, nearest)
    else:
        return _integer(v)


@triton.jit
def _largest_magnitude_bits(x: tl.tensor) -> tl.tensor:
    """Return the bits of each block's largest magnitude: >= 0x7f800000 with NaN or Inf."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


@triton.jit
def bfloat16_bits(x: tl.tensor) -> tl.tensor:
    """Round fp32 ``x`` to bfloat16, ties to even, and return its 16 bits in an int32."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0)  # rounding up could turn the bits of NaN into zero


@triton.jit
def symmetric_step(maximum: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Return the fp32 steps of maxima given as bfloat16 bits in an int32."""
    TOP_INTEGER: tl.constexpr = 127.0 if KIND == "int8" else 7.0
    TOP_FLOAT: tl.constexpr = 448.0 if KIND == "e4m3" else 57344.0
    TOP: tl.constexpr = TOP_INTEGER if KIND == "int8" or KIND == "int4" else TOP_FLOAT
    value = (maximum << 16).to(tl.float32, bitcast=True)
    return tl.div_rn(value, tl.full(value.shape, TOP, tl.float32))


@triton.jit
def symmetric_codes(
    x: tl.tensor,
    noise: tl.tensor,
    LARGEST_BITS: tl.constexpr,
    KIND: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr,
) -> tl.tensor:
    """Return a tile's int32 codes, and each block's maximum as bfloat16 bits in an int32.

    ``LARGEST_BITS`` is the upper limit of the maximum, as fp32 bits.
    """
    largest = _largest_magnitude_bits(x)
    is_finite = largest < 0x7F800000
    # Clamp to [2**-100, limit] on the bits, which are ordered like magnitudes; round to bfloat16.
    largest = tl.minimum(tl.maximum(largest, 0x0D800000), LARGEST_BITS)
    maximum = tl.where(is_finite, (largest + 0x7FFF + ((largest >> 16) & 1)) >> 16, 0x7FC0)
    step = symmetric_step(maximum, KIND)
    v = x * tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)[:, None]
    if KIND == "e4m3" or KIND == "e5m2":
        codes = _float8_codes(v, noise, KIND, IS_STOCHASTIC)
    else:
        codes = _round(v, noise, IS_STOCHASTIC)
        if IS_STOCHASTIC:  # rounding to nearest never exceeds the top level
            TOP: tl.constexpr = 127 if KIND == "int8" else 7
            codes = tl.minimum(tl.maximum(codes, -TOP), TOP)
    return tl.where(is_finite[:, None], codes, 0), maximum


@triton.jit
def _float8_codes(
    v: tl.tensor, noise: tl.tensor, KIND: tl.constexpr, IS_STOCHASTIC: tl.constexpr
) -> tl.tensor:
    """Return the fp8 bytes of ``v``.

    Besides the sign, a byte is ``max(exponent of |v|, emin) - emin`` in the exponent bits plus
    ``|v| / q`` rounded to an integer. The leading bit of normal numbers adds 1 to the exponent. The
    sum is right even if rounding carries into the next exponent.
    """
    MANTISSA: tl.constexpr = 3 if KIND == "e4m3" else 2
    SMALLEST_EXPONENT: tl.constexpr = -6 if KIND == "e4m3" else -14
    TOP_CODE: tl.constexpr = 0x7E if KIND == "e4m3" else 0x7B
    TOP: tl.constexpr = 448.0 if KIND == "e4m3" else 57344.0
    magnitude = tl.minimum(tl.abs(v), TOP)
    exponent = (magnitude.to(tl.int32, bitcast=True) >> 23) - 127
    exponent = tl.maximum(exponent, SMALLEST_EXPONENT)
    per_unit = ((127 + MANTISSA - exponent) << 23).to(tl.float32, bitcast=True)
    levels = _round(magnitude * per_unit, noise, IS_STOCHASTIC)
    codes = tl.minimum(((exponent - SMALLEST_EXPONENT) << MANTISSA) + levels, TOP_CODE)
    is_negative = (v.to(tl.int32, bitcast=True) < 0) & (codes > 0)  # zero is always +0
    return tl.where(is_negative, codes | 0x80, codes)


@triton.jit
def float8_value(byte: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Return the fp32 values of fp8 bytes in an int32, including NaN and Inf."""
    MANTISSA: tl.constexpr = 3 if KIND == "e4m3" else 2
    BIAS: tl.constexpr = 7 if KIND == "e4m3" else 15
    TOP_CODE: tl.constexpr = 0x7E if KIND == "e4m3" else 0x7B
    magnitude = byte & 0x7F
    exponent = magnitude >> MANTISSA
    fraction = magnitude & ((1 << MANTISSA) - 1)
    levels = tl.where(exponent > 0, fraction + (1 << MANTISSA), fraction)
    unit = (tl.maximum(exponent, 1) + (127 - BIAS - MANTISSA)) << 23
    bits = (levels.to(tl.float32) * unit.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    if KIND == "e4m3":
        special = 0x7FC00000
    else:
        special = tl.where(fraction > 0, 0x7FC00000, 0x7F800000)
    bits = tl.where(magnitude > TOP_CODE, special, bits) | ((byte & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def asymmetric_codes(
    x: tl.tensor,
    is_counted: tl.tensor,
    noise: tl.tensor,
    TOP_INDEX: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr,
    KEPT_DTYPE: tl.constexpr,
) -> tl.tensor:
    """Return a tile's int32 codes, and the bits of each block's smallest and largest element.

    ``is_counted`` marks the elements that the extremes are taken from. ``KEPT_DTYPE`` is the dtype
    in which dequantized values must survive a second quantization unchanged, or "none".
    """
    is_finite = _largest_magnitude_bits(x) < 0x7F800000
    lo = tl.min(tl.where(is_counted, x, float("inf")), axis=1)
    hi = tl.max(tl.where(is_counted, x, float("-inf")), axis=1)
    lo = tl.where(is_finite, tl.where(lo == 0, 0.0, lo), float("nan"))  # -0 becomes +0
    hi = tl.where(is_finite, tl.where(hi == 0, 0.0, hi), float("nan"))
    step = _asymmetric_step(lo, hi, TOP_INDEX)
    per_step = tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step) * 2.0
    v = (x * 0.5 - (lo * 0.5)[:, None]) * per_step[:, None]
    index = tl.minimum(tl.maximum(_round(v, noise, IS_STOCHASTIC), 0), TOP_INDEX)
    if KEPT_DTYPE != "none":
        index = _keep_exact(index, x, lo, hi, step, TOP_INDEX, KEPT_DTYPE)
    codes = tl.where((x == 0) | (is_finite == 0)[:, None], 0, index + 1)
    lo_bits = tl.where(is_finite, lo.to(tl.int32, bitcast=True), 0x7FC00000)
    hi_bits = tl.where(is_finite, hi.to(tl.int32, bitcast=True), 0x7FC00000)
    return codes, lo_bits, hi_bits


@triton.jit
def asymmetric_values(
    codes: tl.tensor, lo: tl.tensor, hi: tl.tensor, TOP_INDEX: tl.constexpr
) -> tl.tensor:
    """Return the fp32 values of int32 codes. ``lo`` and ``hi`` are fp32, one per block."""
    step = _asymmetric_step(lo, hi, TOP_INDEX)
    values = _value_of(codes - 1, lo, hi, step, TOP_INDEX)
    return tl.where(codes == 0, (lo - lo)[:, None], values)  # zero, or NaN in a non-finite block


@triton.jit
def _asymmetric_step(lo: tl.tensor, hi: tl.tensor, TOP_INDEX: tl.constexpr) -> tl.tensor:
    half_range = hi * 0.5 - lo * 0.5
    step = tl.div_rn(half_range, tl.full(half_range.shape, TOP_INDEX / 2, tl.float32))
    return tl.where(step < 2.0**-107, 2.0**-107, step)  # keeps NaN, unlike tl.maximum


@triton.jit
def _value_of(
    index: tl.tensor, lo: tl.tensor, hi: tl.tensor, step: tl.tensor, TOP_INDEX: tl.constexpr
) -> tl.tensor:
    # In halves, because index * step may overflow although the value does not.
    halves = index.to(tl.float32) * (step * 0.5)[:, None] + (lo * 0.5)[:, None]
    values = tl.where(index == 0, lo[:, None], halves * 2.0)
    return tl.where(index == TOP_INDEX, hi[:, None], values)


@triton.jit
def _keep_exact(
    index: tl.tensor,
    x: tl.tensor,
    lo: tl.tensor,
    hi: tl.tensor,
    step: tl.tensor,
    TOP_INDEX: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Use a neighbour of ``index`` that decodes to exactly ``x`` if ``index`` does not."""
    above = tl.minimum(index + 1, TOP_INDEX)
    below = tl.maximum(index - 1, 0)
    is_wrong = _cast(_value_of(index, lo, hi, step, TOP_INDEX), DTYPE) != x
    is_above = _cast(_value_of(above, lo, hi, step, TOP_INDEX), DTYPE) == x
    is_below = _cast(_value_of(below, lo, hi, step, TOP_INDEX), DTYPE) == x
    moved = tl.where(is_below, below, tl.where(is_above, above, index))
    return tl.where(is_wrong, moved, index)


@triton.jit
def _cast(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Round fp32 to ``DTYPE``, and return it as fp32."""
    if DTYPE == "bf16":
        return (bfloat16_bits(x) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == "fp16":
        return x.to(tl.float16).to(tl.float32)
    else:
        return x
