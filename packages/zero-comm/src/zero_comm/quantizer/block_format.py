"""Byte layout of a quantized buffer. This module has arithmetic on sizes, and no tensors.

[Note: the quantized buffer]
A flat tensor of ``numel`` elements is divided into **blocks** of ``block_size`` consecutive
elements. Zeros pad the last block. A block has one **scale**, and one **code** per element. The
buffer is flat uint8 and has three parts::

    codes     num_blocks * block_size * bits / 8    block after block
    scales    num_blocks * 2, or * 8 (asymmetric)   native byte order
    padding   to a multiple of 16                   zeros

With 8 bits, byte ``i`` of a block is the code of element ``i``. With 4 bits, byte ``j`` holds the
codes of elements ``j`` and ``j + block_size / 2``, so that kernels access contiguous elements. The
total size is a multiple of 16 bytes, so in a matrix of buffers every row is aligned for wide loads.
All backends produce the same bytes and values. Arithmetic is fp32 without fused multiply-add.

[Note: symmetric codes]
The scale is the block's **maximum**: its largest magnitude, limited to at least 2**-100 and at most
the largest bfloat16 that the tensor's dtype can hold, and rounded to bfloat16. The **step** is the
maximum divided by the top **level**. A code encodes ``v = x * (1 / step)``, and decodes to the code
times the step.

int8 and int4: the top level is 127 or 7. The code is ``v`` rounded to the nearest integer, ties to
even. A 4-bit pair is the int8 ``code(j) + 16 * code(j + block_size / 2)``. It decodes to the
sign-extended low nibble and to ``(byte + 8) >> 4``.

e4m3 and e5m2: the top level is 448 or 57344, the largest finite ``torch.float8_e4m3fn`` or
``torch.float8_e5m2``. The code is ``v`` in that type, after ``v`` is clamped to the top level. With
``q = 2**(max(exponent of |v|, emin) - mantissa bits)`` the magnitude of the code is ``q`` times
``|v| / q`` rounded to the nearest integer, ties to even. Its sign is that of ``v``, but zero is
always +0.

The buffer stores the maximum instead of the step, because 16 bits represent the maximum of 16-bit
input exactly. With a rounded step a second quantization could change the grid.

[Note: asymmetric codes]
The scale is the smallest element ``lo`` and the largest element ``hi`` as fp32, with +0.0 for zero.
Padding does not count, except with a rotation, which mixes padding into the elements. Code 0 is
exactly zero. Codes 1 to ``K + 1`` stand for ``k = code - 1``, where K is 254, or 14 with 4 bits::

    step     = max((hi / 2 - lo / 2) / (K / 2), 2**-107)
    k        = (x / 2 - lo / 2) * (2 * (1 / step)), to the nearest, ties to even, within [0, K]
    value(k) = lo if k == 0, hi if k == K, else 2 * (lo / 2 + k * (step / 2))

The formulas use halves because ``hi - lo`` and ``K * step`` may overflow. If the dtype's spacing is
about a step, a dequantized value next to a power of two, where the spacing changes, may be nearest
to another ``k`` than it was decoded from. A second quantization must not change values. The encoder
therefore uses ``k + 1`` or ``k - 1`` if the value of that index, rounded to the tensor's dtype,
equals ``x`` and ``value(k)`` does not. It omits this correction with a rotation or stochastic
rounding. A 4-bit pair is ``code(j) | code(j + block_size / 2) << 4``.

[Note: non-finite blocks]
The scale of a block with NaN or Inf is NaN (0x7fc0, or 0x7fc00000 twice if asymmetric), and its
codes are 0. All its elements decode to NaN.

[Note: stochastic rounding]
With a seed, rounding to the nearest becomes ``floor(v + u)``, limited to the top code. ``v`` stands
for the unrounded number: ``v`` of integer codes, ``|v| / q`` of fp8 codes, or ``k``. The noise is
``u = (mix(i + mix(s)) >> 8) * 2**-24``, where ``i`` is the element's index in its row and ``s =
seed + 0x9e3779b1 * group + 0x9e3779b9 * row``. ``row`` counts within its group. Ungrouped rows have
group 0. Arithmetic is modulo 2**32. ``mix`` is lowbias32 of Wellons' hash prospector: ``x ^= x >>
16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b; x ^= x >> 16``.

[Note: rotation]
Before the scale is computed, groups of 64 consecutive elements of the padded blocks are multiplied
by the orthonormal Hadamard matrix in Sylvester order: ``x *= 0.125``, then for h = 1, 2, ..., 32
``(a, b) -> (a + b, a - b)`` for elements at distance ``h``, in fp32. The matrix is its own inverse,
so decoding applies it again. The upper limit of a rotated block's maximum is that of fp32 tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

ALIGNMENT: Final = 16  # bytes
ROTATION_SIZE: Final = 64  # elements
GROUP_SEED_STEP: Final = 0x9E3779B1  # added to the seed for each group of rows

# 16-bit tensors shrink by a factor of 1.98 with int8 and 3.88 with int4, scales included. int4 has
# smaller blocks than int8: with 7 levels an outlier costs its neighbours more precision.
DEFAULT_BLOCK_SIZE: Final[Mapping[str, int]] = MappingProxyType(
    {"int8": 256, "int4": 128, "e4m3": 128, "e5m2": 128}
)
_TOP_LEVEL: Final = {"int8": 127.0, "int4": 7.0, "e4m3": 448.0, "e5m2": 57344.0}
_TOP_INDEX: Final = {"int8": 254, "int4": 14}


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Code type and block size of a quantized buffer.

    Args:
        kind: "int8", "int4", "e4m3" or "e5m2".
        block_size: elements per block, a positive multiple of 8, or of 64 with a rotation.
        is_symmetric: whether the grid is centred on zero. If not, the grid spans the block's
            smallest to largest element, for int8 and int4 only. See [Note: asymmetric codes].
        has_rotation: whether groups of 64 elements are rotated. See [Note: rotation].
    """

    kind: str
    block_size: int
    is_symmetric: bool = True
    has_rotation: bool = False

    def __post_init__(self) -> None:
        if self.kind not in DEFAULT_BLOCK_SIZE:
            raise ValueError(
                f"format must be one of {', '.join(DEFAULT_BLOCK_SIZE)}, got {self.kind!r}"
            )
        unit = ROTATION_SIZE if self.has_rotation else 8
        if self.block_size <= 0 or self.block_size % unit != 0:
            raise ValueError(
                f"block_size must be a positive multiple of {unit}"
                f"{' with a rotation' if self.has_rotation else ''}, got {self.block_size!r}"
            )
        if not self.is_symmetric and self.kind not in _TOP_INDEX:
            raise ValueError(f"is_symmetric must be true for {self.kind}: its codes have a sign")

    @classmethod
    def make(cls, spec: str | BlockFormat) -> BlockFormat:
        """Return ``spec`` if it is a `BlockFormat`, else the symmetric default of kind ``spec``."""
        if isinstance(spec, BlockFormat):
            return spec
        return cls(spec, DEFAULT_BLOCK_SIZE.get(spec, 8))

    @property
    def bits(self) -> int:
        """Bits per code."""
        return 4 if self.kind == "int4" else 8

    @property
    def is_float(self) -> bool:
        """Whether codes are fp8 numbers."""
        return self.kind not in _TOP_INDEX

    @property
    def top_level(self) -> float:
        """Number of steps from zero to the maximum of a symmetric block."""
        return _TOP_LEVEL[self.kind]

    @property
    def top_index(self) -> int:
        """K of [Note: asymmetric codes], the number of steps between a block's extremes."""
        return _TOP_INDEX[self.kind]

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block's codes."""
        return self.block_size * self.bits // 8

    @property
    def scale_nbytes(self) -> int:
        """Bytes of a block's scale."""
        return 2 if self.is_symmetric else 8

    def num_blocks(self, numel: int) -> int:
        """Return the number of blocks of ``numel`` elements, including the padded block."""
        if numel < 0:
            raise ValueError(f"numel must not be negative, got {numel}")
        return -(-numel // self.block_size)

    def codes_nbytes(self, numel: int) -> int:
        """Return the size of all codes in bytes, which is also the offset of the scales."""
        return self.num_blocks(numel) * self.block_nbytes

    def used_nbytes(self, numel: int) -> int:
        """Return the size of codes and scales in bytes, which is also the offset of the padding."""
        return self.num_blocks(numel) * (self.block_nbytes + self.scale_nbytes)

    def nbytes(self, numel: int) -> int:
        """Return the size of the whole buffer in bytes."""
        return -(-self.used_nbytes(numel) // ALIGNMENT) * ALIGNMENT


def quantized_nbytes(numel: int, format: str | BlockFormat = "int8") -> int:
    """Return the size in bytes of the buffer that `zero_comm.quantize` makes of ``numel`` elements.

    See [Note: the quantized buffer]. ``format`` is "int8", "int4", "e4m3", "e5m2" or a
    `BlockFormat`.

    Raises:
        ValueError: an argument is out of range.
    """
    return BlockFormat.make(format).nbytes(numel)


def seed_of_group(seed: int | None, group: int) -> int | None:
    """Return the seed of a group's first row. See [Note: stochastic rounding]."""
    return None if seed is None else (seed + GROUP_SEED_STEP * group) % 2**32
