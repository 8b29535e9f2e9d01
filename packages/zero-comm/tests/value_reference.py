"""The buffer of [Note: the value buffer] by its definition: one block and integer at a time.

Nothing of zero_comm and of torch is used. Elements are integers, their bits.
"""

import struct
from collections.abc import Sequence

BLOCK = 256


def reference_values_buffer(elements: Sequence[int], bits: int) -> bytes:
    """Code elements of ``bits`` bits."""
    blocks = [_encode(elements[i : i + BLOCK], bits) for i in range(0, len(elements), BLOCK)]
    descriptors = [struct.pack("=H", mode * 2048 + len(data)) for mode, data in blocks]
    return b"".join(descriptors) + b"".join(data for _, data in blocks)


def reference_elements(buffer: bytes, numel: int, bits: int) -> list[int]:
    """Decode what `reference_values_buffer` gave."""
    num_blocks = (numel + BLOCK - 1) // BLOCK
    found: list[int] = []
    end = 2 * num_blocks
    for number, (descriptor,) in enumerate(struct.iter_unpack("=H", buffer[:end])):
        start, end = end, end + descriptor % 2048
        count = min(BLOCK, numel - number * BLOCK)
        found += _decode(descriptor // 2048, buffer[start:end], count, bits)
    assert end == len(buffer)
    return found


def _encode(elements: Sequence[int], bits: int) -> tuple[int, bytes]:
    if not any(elements):
        return 0, b""
    candidates = {1: b"".join(x.to_bytes(bits // 8, "little") for x in elements)}
    if len(elements) == BLOCK:
        rotated = [(x << 1 | x >> (bits - 1)) % 2**bits for x in elements]
        tops = [x >> (bits - 8) for x in rotated]
        base = max(tops)
        low = b"".join(bytes(x >> 8 * k & 0xFF for x in rotated) for k in range(bits // 8 - 1))
        for width in range(7):
            largest = 2**width - 1
            codes = [min(base - top, largest) for top in tops]
            if width == 0 and any(top != base for top in tops):
                continue
            planes = [
                sum((code >> k & 1) << i for i, code in enumerate(codes)) for k in range(width)
            ]
            escapes = [top for top, code in zip(tops, codes, strict=True) if code == largest]
            candidates[2 + width] = (
                bytes([base])
                + low
                + b"".join(plane.to_bytes(BLOCK // 8, "little") for plane in planes)
                + bytes(escapes if width else [])
            )
    best = min(candidates, key=lambda mode: (len(candidates[mode]), mode))
    return best, candidates[best]


def _decode(mode: int, data: bytes, count: int, bits: int) -> list[int]:
    if mode == 0:
        return [0] * count
    size = bits // 8
    if mode == 1:
        return [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]
    width, base, at = mode - 2, data[0], 1 + BLOCK * (size - 1)
    planes = [int.from_bytes(data[at + k * 32 : at + (k + 1) * 32], "little") for k in range(width)]
    escapes = iter(data[at + width * 32 :])
    found = []
    for i in range(BLOCK):
        code = sum((plane >> i & 1) << k for k, plane in enumerate(planes))
        top = next(escapes) if width and code == 2**width - 1 else base - code
        rotated = top << (bits - 8)
        for k in range(size - 1):
            rotated |= data[1 + k * BLOCK + i] << 8 * k
        found.append(rotated >> 1 | (rotated & 1) << (bits - 1))
    assert next(escapes, None) is None
    return found
