"""The buffer of [Note: the quantized buffer], written from its definition in NumPy, block by block.

The module uses zero_comm only for the fields of a format, and torch only to convert dtypes.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zero_comm import BlockFormat

Array = NDArray[np.float32]

ALL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LEVEL = {"int8": 127, "int4": 7, "e4m3": 448, "e5m2": 57344}
TOP_INDEX = {"int8": 254, "int4": 14}
FLOAT8 = {"e4m3": (-6, 3, torch.float8_e4m3fn), "e5m2": (-14, 2, torch.float8_e5m2)}
HALF = np.float32(0.5)


@dataclass(frozen=True)
class Block:
    """One quantized block: the bytes of its codes and scale, and its dequantized values."""

    codes: bytes
    scale: bytes
    values: Array
    step: float


def reference_blocks(x: Tensor, fmt: BlockFormat, seed: int | None = None) -> list[Block]:
    noise = uniform(seed, len(x) + fmt.block_size)
    starts = range(0, len(x), fmt.block_size)
    return [
        _block(x[i : i + fmt.block_size], fmt, None if noise is None else noise[i:]) for i in starts
    ]


def reference_buffer(x: Tensor, fmt: BlockFormat, seed: int | None = None) -> Tensor:
    """Return the expected bytes of quantizing finite 1-D ``x``."""
    blocks = reference_blocks(x, fmt, seed)
    data = b"".join([b.codes for b in blocks] + [b.scale for b in blocks])
    return torch.tensor(list(data + bytes(-len(data) % 16)), dtype=torch.uint8)


def reference_values(x: Tensor, fmt: BlockFormat, seed: int | None = None) -> Tensor:
    """Return the expected fp32 values of dequantizing `reference_buffer`."""
    blocks = reference_blocks(x, fmt, seed)
    values = np.concatenate([b.values for b in blocks] or [np.zeros(0, np.float32)])
    return torch.from_numpy(values)[: len(x)]


def steps_per_element(x: Tensor, fmt: BlockFormat) -> Tensor:
    """Return the step of the block of each element of 1-D ``x``, in fp64."""
    steps = [b.step for b in reference_blocks(x, fmt)]
    return torch.tensor(steps, dtype=torch.float64).repeat_interleave(fmt.block_size)[: len(x)]


def uniform(seed: int | None, count: int) -> Array | None:
    """Return the random ``u`` of [Note: stochastic rounding], None without a seed."""
    if seed is None:
        return None
    mixed = _mix(np.array([seed], np.uint64))
    return (_mix(np.arange(count, dtype=np.uint64) + mixed) >> np.uint64(8)).astype(
        np.float32
    ) * np.float32(2.0**-24)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = np.uint64(0xFFFFFFFF)
    x = x & mask
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D)) & mask
    x = ((x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B)) & mask
    return x ^ (x >> np.uint64(16))


def hadamard(values: Array) -> Array:
    """Rotate groups of 64 in fp32, in the order of operations of [Note: rotation]."""
    groups = values.reshape(-1, 64) * np.float32(0.125)
    for h in (1, 2, 4, 8, 16, 32):
        pairs = groups.reshape(-1, 32 // h, 2, h)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        groups = np.stack([a + b, a - b], axis=2).reshape(-1, 64)
    return groups.reshape(-1)


def _block(x: Tensor, fmt: BlockFormat, noise: Array | None) -> Block:
    dtype, num_valid = x.dtype, len(x)
    values = np.zeros(fmt.block_size, np.float32)
    values[: len(x)] = x.float().numpy()
    noise = None if noise is None else noise[: fmt.block_size]
    if fmt.has_rotation:
        values, dtype, num_valid = hadamard(values), torch.float32, fmt.block_size
    if fmt.is_symmetric:
        block = _symmetric(values, fmt, dtype, noise)
    else:
        block = _asymmetric(values, fmt, dtype, num_valid, noise)
    if not fmt.has_rotation:
        return block
    with np.errstate(over="ignore", invalid="ignore"):
        return Block(block.codes, block.scale, hadamard(block.values), block.step)


def _symmetric(values: Array, fmt: BlockFormat, dtype: torch.dtype, noise: Array | None) -> Block:
    top = 65280.0 if dtype == torch.float16 else torch.finfo(torch.bfloat16).max
    maximum = torch.tensor(min(max(float(np.abs(values).max()), 2.0**-100), top)).bfloat16()
    level = np.float32(LEVEL[fmt.kind])
    step = np.float32(maximum.item()) / level
    v = values * (np.float32(1) / step)
    if fmt.kind in FLOAT8:
        numbers, codes = _float8(v, fmt.kind, noise)
    else:
        numbers = _rounded(v, noise).clip(-level, level)
        codes = _packed(numbers.astype(np.int64), fmt)
    return Block(
        codes, bytes(maximum.view(1).view(torch.uint8).tolist()), numbers * step, float(step)
    )


def _rounded(v: Array, noise: Array | None) -> Array:
    return np.rint(v) if noise is None else np.floor(v + noise)


def _float8(v: Array, kind: str, noise: Array | None) -> tuple[Array, bytes]:
    emin, mantissa_bits, dtype = FLOAT8[kind]
    top = np.float32(LEVEL[kind])
    magnitude = np.minimum(np.abs(v), top)
    exponent = np.frexp(magnitude)[1] - 1
    exponent[magnitude == 0] = emin
    unit = np.exp2(np.maximum(exponent, emin) - mantissa_bits).astype(np.float32)
    numbers = np.minimum(_rounded(magnitude / unit, noise) * unit, top)
    numbers = np.where(numbers == 0, np.float32(0), np.copysign(numbers, v)).astype(np.float32)
    as_type = torch.from_numpy(numbers).to(dtype)
    assert torch.equal(as_type.float(), torch.from_numpy(numbers)), "these are numbers of the type"
    return numbers, bytes(as_type.view(torch.uint8).tolist())


def _asymmetric(
    values: Array, fmt: BlockFormat, dtype: torch.dtype, num_valid: int, noise: Array | None
) -> Block:
    top = TOP_INDEX[fmt.kind]
    lo = np.float32(values[:num_valid].min() + np.float32(0))  # adding zero turns -0 into +0
    hi = np.float32(values[:num_valid].max() + np.float32(0))
    step = max((hi * HALF - lo * HALF) / np.float32(top // 2), np.float32(2.0**-107))
    with np.errstate(over="ignore"):  # padding may be far outside [lo, hi]
        place = (values * HALF - lo * HALF) * (np.float32(2) * (np.float32(1) / step))
    k = _rounded(place, noise).clip(0, top).astype(np.int64)

    def value(index: NDArray[np.int64]) -> Array:
        with np.errstate(over="ignore"):  # only ``grid`` at ``top`` overflows: not used
            grid = np.float32(2) * (lo * HALF + index.astype(np.float32) * (step * HALF))
        return np.where(index == 0, lo, np.where(index == top, hi, grid)).astype(np.float32)

    def is_exact(index: NDArray[np.int64]) -> NDArray[np.bool_]:
        return np.asarray(torch.from_numpy(value(index)).to(dtype).double().numpy() == values)

    if noise is None and not fmt.has_rotation:
        is_wrong = ~is_exact(k)
        for neighbour in (np.minimum(k + 1, top), np.maximum(k - 1, 0)):
            k = np.where(is_wrong & is_exact(neighbour), neighbour, k)
    is_zero = values == 0
    codes = _packed(np.where(is_zero, 0, k + 1), fmt)
    decoded = np.where(is_zero, np.float32(0), value(k)).astype(np.float32)
    return Block(codes, lo.tobytes() + hi.tobytes(), decoded, float(step))


def _packed(codes: NDArray[np.int64], fmt: BlockFormat) -> bytes:
    if fmt.kind == "int4":
        half = fmt.block_size // 2
        codes = codes[:half] + 16 * codes[half:]
    return (codes % 256).astype(np.uint8).tobytes()
