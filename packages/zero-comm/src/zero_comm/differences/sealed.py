"""Header and checksum of messages whose bytes a codec writes, checked before the bytes are used.

[Note: the sealed message]
A header of 48 bytes, in native byte order, and then the codec's buffer, padded with zeros to a
multiple of 16 bytes::

    0   2  two letters: what the buffer holds
    2   1  version of this layout: 1
    3   1  bytes of an element
    4   4  elements of a block
    8   8  elements
    16  16 two numbers that sender and receiver know, such as the versions of a difference
    32  8  bytes of the buffer
    40  8  checksum of the padded buffer (`zero_comm.quantizer.checksum`)
"""

from __future__ import annotations

import struct
from typing import Final

import torch
from torch import Tensor

from zero_comm.differences.difference_format import BLOCK_NUMEL, descriptors_nbytes
from zero_comm.quantizer.checksum import checksums
from zero_comm.quantizer.message import CorruptMessageError

HEADER_NBYTES: Final = 48
_ALIGNMENT: Final = 16
_FIXED: Final = "=2sBBIqqq"
_LENGTHS: Final = "=qq"
_LENGTHS_AT: Final = struct.calcsize(_FIXED)


def sealed_nbytes(nbytes: int) -> int:
    """Return the bytes of a message whose buffer has ``nbytes``."""
    return HEADER_NBYTES + _padded(nbytes)


def seal(
    message: Tensor, nbytes: int, letters: bytes, values: Tensor, numbers: tuple[int, int]
) -> int:
    """Write the header before a buffer of ``nbytes``, and the zeros after it.

    The buffer begins after `HEADER_NBYTES`. ``values`` are the elements that it is made from.
    Return the message's bytes, a multiple of 16.
    """
    body = message[HEADER_NBYTES : HEADER_NBYTES + _padded(nbytes)]
    body[nbytes:] = 0
    fixed = _pack_fixed(letters, values, numbers)
    lengths = struct.pack(_LENGTHS, nbytes, int(checksums(body)))
    header = torch.frombuffer(bytearray(fixed + lengths), dtype=torch.uint8)
    message[:HEADER_NBYTES] = header.to(message.device)
    return sealed_nbytes(nbytes)


def unseal(
    message: Tensor, letters: bytes, values: Tensor, numbers: tuple[int, int], *, max_nbytes: int
) -> Tensor:
    """Return the buffer of a message for ``values``, after all checks.

    The text of a CorruptMessageError is for a sentence that names the sender.
    """
    header = bytes(message[:HEADER_NBYTES].tolist())
    if len(header) < HEADER_NBYTES:
        raise CorruptMessageError(f"it has {len(header)} bytes")
    expected = _pack_fixed(letters, values, numbers)
    if header[:_LENGTHS_AT] != expected:
        found, wanted = (struct.unpack(_FIXED, h[:_LENGTHS_AT]) for h in (header, expected))
        raise CorruptMessageError(f"its header says {found}; expected {wanted}")
    nbytes, checksum = struct.unpack_from(_LENGTHS, header, _LENGTHS_AT)
    least = descriptors_nbytes(values.numel())
    if not least <= nbytes <= max_nbytes or sealed_nbytes(nbytes) > message.numel():
        raise CorruptMessageError(
            f"its header says that {nbytes} bytes follow, of {least} to {max_nbytes} that may, and "
            f"{message.numel() - HEADER_NBYTES} arrived"
        )
    body = message[HEADER_NBYTES : HEADER_NBYTES + _padded(nbytes)]
    if int(checksums(body)) != checksum:
        raise CorruptMessageError("its checksum does not match its bytes")
    return body[:nbytes]


def _pack_fixed(letters: bytes, values: Tensor, numbers: tuple[int, int]) -> bytes:
    facts = 1, values.element_size(), BLOCK_NUMEL, values.numel()
    return struct.pack(_FIXED, letters, *facts, *numbers)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
