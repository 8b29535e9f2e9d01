"""Format of a quantized buffer: meaning and offset of each byte. Pure arithmetic, no tensors.

[Note: the quantized buffer]
A flat tensor of ``numel`` elements is cut into **blocks** of ``block_size`` consecutive elements;
the last block is padded with zeros. A block has one **scale** and a **code** for each element. The
buffer is flat uint8, in three parts::

    codes     num_blocks * block_size * bits / 8    block after block
    scales    num_blocks * 2, or * 8 (asymmetric)   native byte order
    padding   to a multiple of 16                   zeros

8 bits: the code of element ``i`` of a block is its byte ``i``. 4 bits: byte ``j`` of a block holds
the codes of elements ``j`` and ``j + block_size / 2``; pairing the halves keeps both operands
contiguous. The total is a multiple of 16 bytes so that each row of many is aligned for wide loads.
All backends give the same bytes and the same values: arithmetic is fp32, each operation rounded on
its own (no fused multiply-add).

[Note: symmetric codes]
The scale is the block's **maximum**: the largest magnitude in it, within 2**-100 and the largest
bfloat16 that the tensor's dtype holds, rounded to bfloat16. The **step** is the maximum divided by
the top **level**, and ``v = x * (1 / step)``. A code times the step is the element again.

int8, int4: the level is 127 or 7, the code is ``v`` rounded to the nearest integer, ties to even.
4 bits: the byte is the int8 ``lo + 16 * hi``; read it as ``hi = (byte + 8) >> 4`` and the low
nibble, sign-extended.

e4m3, e5m2: the level is 448 or 57344, the largest finite number of ``torch.float8_e4m3fn`` or
``torch.float8_e5m2``; the code is ``v``, no further from zero than the level, in that type:
``q = 2**(max(exponent of |v|, emin) - mantissa bits)``, ``|v| / q`` rounded to the nearest
integer, ties to even, times ``q``, with the sign of ``v``; what rounds to zero is +0.

The maximum is stored, not the step, because for 16-bit input it is representable in 16 bits and
comes back exactly; with a rounded step, a second quantization could move the grid.

[Note: asymmetric codes]
The scale is the smallest element ``lo`` and the largest ``hi``, both fp32, +0.0 for a zero
(padding isn't counted, unless there is a rotation: it is then part of what was rotated). Code 0 is
exactly zero. Codes 1 to ``K + 1`` (K is 254, or 14 for 4 bits) are ``k = code - 1``::

    step     = max((hi / 2 - lo / 2) / (K / 2), 2**-107)
    k        = (x / 2 - lo / 2) * (2 * (1 / step)), to the nearest, ties to even, within [0, K]
    value(k) = lo if k == 0, hi if k == K, else 2 * (lo / 2 + k * (step / 2))

Halves, because ``hi - lo`` and ``K * step`` may overflow; and the difference of halves is exact
where that of ``hi / K`` and ``lo / K`` is not. When the dtype's spacing is about a step, the
nearest ``k`` of what once came out of the quantizer may be another than the one it came from, next
to a power of two, where the spacing changes. So that a second quantization changes nothing: if
``value(k)``, rounded to the tensor's dtype, isn't ``x``, but that of ``k + 1`` or ``k - 1`` is,
that is the code's. Not with a rotation or stochastic rounding. 4 bits: the byte is
``code(j) | code(j + block_size / 2) << 4``.

[Note: non-finite blocks]
The scale of a block with NaN or Inf is NaN (0x7fc0; asymmetric twice 0x7fc00000), its codes are 0,
and all its elements come back as NaN.

[Note: stochastic rounding]
With a seed, "to the nearest" becomes ``floor(v + u)``, not past the top code, of ``v`` (ints),
``|v| / q`` (fp8) or ``k`` before its rounding; ``u = (mix(i + mix(s)) >> 8) * 2**-24`` where ``i``
is the element's index in its row, ``s = seed + 0x9e3779b1 * group + 0x9e3779b9 * row`` with the row
within its group (the one group is 0 where there are none), all mod 2**32, and ``mix`` is lowbias32
of Wellons' hash prospector: ``x ^= x >> 16; x *= 0x7feb352d; x ^= x >> 15; x *= 0x846ca68b;
x ^= x >> 16``.

[Note: rotation]
Groups of 64 consecutive elements of the padded blocks are multiplied by the orthonormal Hadamard
matrix in Sylvester order before the scale is taken: ``x *= 0.125``, then for h = 1, 2, ..., 32
``(a, b) -> (a + b, a - b)`` for elements ``h`` apart, in fp32. It is its own inverse: decoding
does the same to the decoded fp32 values. The maximum is then limited by bfloat16 alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

ALIGNMENT: Final = 16  # bytes
ROTATION_SIZE: Final = 64  # elements
GROUP_SEED_STEP: Final = 0x9E3779B1  # between the seeds of two groups of rows

# Per 16-bit element, scales included: 8 bits send 1/1.98 of the bytes, 4 bits 1/3.88. A block of
# 4-bit codes is smaller because an outlier costs its neighbours more: 7 levels instead of 127.
DEFAULT_BLOCK_SIZE: Final[Mapping[str, int]] = MappingProxyType(
    {"int8": 256, "int4": 128, "e4m3": 128, "e5m2": 128}
)
_TOP_LEVEL: Final = {"int8": 127.0, "int4": 7.0, "e4m3": 448.0, "e5m2": 57344.0}
_TOP_INDEX: Final = {"int8": 254, "int4": 14}


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Kind of code, and number of elements that share a scale.

    Args:
        kind: "int8", "int4", "e4m3" or "e5m2".
        block_size: elements per block, a positive multiple of 8; of 64 with a rotation.
        is_symmetric: whether the grid is centred on zero; if not (int8 and int4 alone) it goes
            from the block's smallest element to its largest, see [Note: asymmetric codes].
        has_rotation: whether groups of 64 elements are rotated, see [Note: rotation].
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
        """Return a format as it is, or a kind's symmetric format of default block size."""
        if isinstance(spec, BlockFormat):
            return spec
        return cls(spec, DEFAULT_BLOCK_SIZE.get(spec, 8))

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.kind == "int4" else 8

    @property
    def is_float(self) -> bool:
        """Whether codes are fp8 numbers."""
        return self.kind not in _TOP_INDEX

    @property
    def top_level(self) -> float:
        """Number of steps from zero to a symmetric block's maximum."""
        return _TOP_LEVEL[self.kind]

    @property
    def top_index(self) -> int:
        """K of asymmetric codes: the number of steps from the smallest element to the largest."""
        return _TOP_INDEX[self.kind]

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block's codes."""
        return self.block_size * self.bits // 8

    @property
    def scale_nbytes(self) -> int:
        """Bytes of one block's scale."""
        return 2 if self.is_symmetric else 8

    def num_blocks(self, numel: int) -> int:
        """Return the number of blocks of ``numel`` elements, the padded one included."""
        if numel < 0:
            raise ValueError(f"numel must not be negative, got {numel}")
        return -(-numel // self.block_size)

    def codes_nbytes(self, numel: int) -> int:
        """Return the bytes of all codes, which is the offset of the scales."""
        return self.num_blocks(numel) * self.block_nbytes

    def used_nbytes(self, numel: int) -> int:
        """Return the bytes of codes and scales, which is the offset of the padding."""
        return self.num_blocks(numel) * (self.block_nbytes + self.scale_nbytes)

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the whole buffer."""
        return -(-self.used_nbytes(numel) // ALIGNMENT) * ALIGNMENT


def quantized_nbytes(numel: int, format: str | BlockFormat = "int8") -> int:
    """Return the bytes of the buffer that `zero_comm.quantize` makes of ``numel`` elements.

    With ``n = ceil(numel / block_size)`` it is ``n * (block_size * bits / 8 + scale)``, rounded up
    to a multiple of 16. A scale has 2 bytes, 8 if asymmetric. See [Note: the
    quantized buffer].

    Args:
        numel: elements of the flat tensor.
        format: "int8", "int4", "e4m3", "e5m2" or a `BlockFormat`.

    Raises:
        ValueError: an argument out of range, by name.
    """
    return BlockFormat.make(format).nbytes(numel)


def seed_of_group(seed: int | None, group: int) -> int | None:
    """Return the seed of a group's first row. See [Note: stochastic rounding]."""
    return None if seed is None else (seed + GROUP_SEED_STEP * group) % 2**32
