"""The buffer of [Note: the difference buffer] by its definition: one block and integer at a time.

Nothing of zero_comm and of torch is used. Elements are integers, their bits.
"""

import struct
from collections.abc import Sequence

BLOCK = 256
WIDTHS = {16: (2, 4, 8), 32: (2, 4, 8, 16)}


def reference_difference(old: Sequence[int], new: Sequence[int], bits: int) -> bytes:
    """Encode what changed between elements of ``bits`` bits."""
    blocks = [
        _encode(old[i : i + BLOCK], new[i : i + BLOCK], bits) for i in range(0, len(old), BLOCK)
    ]
    descriptors = [struct.pack("=H", mode * 2048 + len(data)) for mode, data in blocks]
    return b"".join(descriptors) + b"".join(data for _, data in blocks)


def reference_values(difference: bytes, old: Sequence[int], bits: int) -> list[int]:
    """Decode what `reference_difference` gave."""
    num_blocks = (len(old) + BLOCK - 1) // BLOCK
    new: list[int] = []
    end = 2 * num_blocks
    for number, (descriptor,) in enumerate(struct.iter_unpack("=H", difference[:end])):
        start, end = end, end + descriptor % 2048
        block = list(old[number * BLOCK : (number + 1) * BLOCK])
        new += _decode(descriptor // 2048, difference[start:end], block, bits)
    assert end == len(difference)
    return new


def ordered(pattern: int, bits: int) -> int:
    """The ordered integer of a bit pattern: all bits inverted below zero, else the sign's."""
    sign = 1 << (bits - 1)
    return pattern ^ (2**bits - 1) if pattern & sign else pattern ^ sign


def moved(pattern: int, difference: int, bits: int) -> int:
    """The bit pattern that is ``difference`` away."""
    integer = (ordered(pattern, bits) + difference) % 2**bits
    sign = 1 << (bits - 1)
    return integer ^ sign if integer & sign else integer ^ (2**bits - 1)


def _zigzag(old: int, new: int, bits: int) -> int:
    difference = (ordered(new, bits) - ordered(old, bits)) % 2**bits
    if difference >= 2 ** (bits - 1):
        difference -= 2**bits
    return 2 * difference if difference >= 0 else -2 * difference - 1


def _bytes_of(elements: Sequence[int], bits: int) -> bytes:
    return b"".join(struct.pack("=H" if bits == 16 else "=I", element) for element in elements)


def _encode(old: Sequence[int], new: Sequence[int], bits: int) -> tuple[int, bytes]:
    """The mode and the bytes of a block."""
    absent = [0] * (BLOCK - len(old))
    z = [_zigzag(a, b, bits) for a, b in zip(old, new, strict=True)] + absent
    changed = [i for i in range(BLOCK) if z[i] > 0]
    if not changed:
        return 0, b""
    less_one = [z[i] - 1 for i in changed]
    candidates = {1: _bytes_of(new, bits)}
    bitmap = sum(1 << i for i in changed).to_bytes(BLOCK // 8, "little")
    for s, width in enumerate(WIDTHS[bits]):
        if len(changed) < BLOCK:
            listed = bytes([len(changed), *changed])
            candidates[2 + s] = listed + _levels(less_one, width, bits)
        candidates[6 + s] = bitmap + _levels(less_one, width, bits)
        candidates[10 + s] = _levels(z, width, bits)
    best = min(candidates, key=lambda mode: (len(candidates[mode]), mode))
    return best, candidates[best]


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


def _decode(mode: int, data: bytes, old: list[int], bits: int) -> list[int]:
    if mode == 0:
        return old
    if mode == 1:
        return [x for (x,) in struct.iter_unpack("=H" if bits == 16 else "=I", data)]
    if mode >= 10:
        at, width, one = list(range(BLOCK)), WIDTHS[bits][mode - 10], 0
    elif mode >= 6:
        bitmap = int.from_bytes(data[: BLOCK // 8], "little")
        at, width, one = [i for i in range(BLOCK) if bitmap >> i & 1], WIDTHS[bits][mode - 6], 1
        data = data[BLOCK // 8 :]
    else:
        at, width, one = list(data[1 : 1 + data[0]]), WIDTHS[bits][mode - 2], 1
        data = data[1 + data[0] :]
    for i, x in zip(at, _integers(data, len(at), width, bits), strict=True):
        z = x + one
        if i < len(old):
            old[i] = moved(old[i], -(z + 1) // 2 if z % 2 else z // 2, bits)
    return old


def _integers(data: bytes, count: int, width: int, bits: int) -> list[int]:
    if not count:
        assert not data
        return []
    top, q = 2**width - 1, (count * width + 7) // 8
    if width >= 8:
        step = width // 8
        codes = [int.from_bytes(data[i : i + step], "little") for i in range(0, q, step)]
    else:
        codes = [data[i % q] >> i // q * width & top for i in range(count)]
    if width == bits:
        assert len(data) == q
        return codes
    more = iter(_integers(data[q:], codes.count(top), 2 * width, bits))
    return [code + next(more) if code == top else code for code in codes]
