"""The buffers of differences and values, written from their definitions one integer at a time.

[Note: the difference buffer] and [Note: the value buffer] in `zero_comm.lossless.block_frame`
define them. The module uses neither zero_comm nor torch. An element is the integer of its bits.
"""

import struct
from collections.abc import Sequence

BLOCK = 256
WIDTHS = {16: (2, 4, 8), 32: (2, 4, 8, 16)}
Blocks = list[tuple[int, bytes]]


def difference_buffer(old: Sequence[int], new: Sequence[int], bits: int) -> bytes:
    """Encode the change between elements of ``bits`` bits."""
    starts = range(0, len(old), BLOCK)
    return _joined([_difference(old[i : i + BLOCK], new[i : i + BLOCK], bits) for i in starts])


def value_buffer(elements: Sequence[int], bits: int) -> bytes:
    starts = range(0, len(elements), BLOCK)
    return _joined([_values(elements[i : i + BLOCK], bits) for i in starts])


def _joined(blocks: Blocks) -> bytes:
    descriptors = [struct.pack("=H", mode * 2048 + len(data)) for mode, data in blocks]
    return b"".join(descriptors) + b"".join(data for _, data in blocks)


def _shortest(candidates: dict[int, bytes]) -> tuple[int, bytes]:
    best = min(candidates, key=lambda mode: (len(candidates[mode]), mode))
    return best, candidates[best]


def _raw(elements: Sequence[int], bits: int) -> bytes:
    return b"".join(struct.pack("=H" if bits == 16 else "=I", element) for element in elements)


def _ordered(pattern: int, bits: int) -> int:
    """Map a float's bit pattern to an integer that sorts like the float."""
    sign = 1 << (bits - 1)
    return pattern ^ (2**bits - 1) if pattern & sign else pattern ^ sign


def _zigzag(old: int, new: int, bits: int) -> int:
    difference = (_ordered(new, bits) - _ordered(old, bits)) % 2**bits
    if difference >= 2 ** (bits - 1):
        difference -= 2**bits
    return 2 * difference if difference >= 0 else -2 * difference - 1


def _difference(old: Sequence[int], new: Sequence[int], bits: int) -> tuple[int, bytes]:
    absent = [0] * (BLOCK - len(old))
    z = [_zigzag(a, b, bits) for a, b in zip(old, new, strict=True)] + absent
    changed = [i for i in range(BLOCK) if z[i] > 0]
    if not changed:
        return 0, b""
    less_one = [z[i] - 1 for i in changed]
    candidates = {1: _raw(new, bits)}
    bitmap = sum(1 << i for i in changed).to_bytes(BLOCK // 8, "little")
    for s, width in enumerate(WIDTHS[bits]):
        if len(changed) < BLOCK:
            listed = bytes([len(changed), *changed])
            candidates[2 + s] = listed + _levels(less_one, width, bits)
        candidates[6 + s] = bitmap + _levels(less_one, width, bits)
        candidates[10 + s] = _levels(z, width, bits)
    return _shortest(candidates)


def _levels(integers: list[int], width: int, bits: int) -> bytes:
    if not integers:
        return b""
    top = 2**width - 1
    codes = [min(x, top) for x in integers]
    if width >= 8:
        data = b"".join(code.to_bytes(width // 8, "little") for code in codes)
    else:
        q = (len(codes) * width + 7) // 8
        data = bytes(
            sum(code << part * width for part, code in enumerate(codes[j::q])) for j in range(q)
        )
    if width == bits:
        return data
    return data + _levels([x - top for x in integers if x >= top], 2 * width, bits)


def _values(elements: Sequence[int], bits: int) -> tuple[int, bytes]:
    if not any(elements):
        return 0, b""
    candidates = {1: _raw(elements, bits)}
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
    return _shortest(candidates)
