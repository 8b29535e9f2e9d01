"""Messages of losslessly coded weights and gradients, checked before their bytes are used.

[Note: the sealed message]
A header of 48 bytes, in native byte order, and then a buffer of [Note: the block frame], padded
with zeros to a multiple of 16 bytes::

    0   2  ZD for differences, ZV for values
    2   1  version of this layout: 1
    3   1  bytes of an element
    4   4  elements of a block
    8   8  elements
    16  16 the versions that differences lead from and to; zeros for values
    32  8  bytes of the buffer
    40  8  checksum of the padded buffer (`zero_comm.quantizer.checksum`)

A receiver of differences would not notice damage later, and checksums of short messages take little
time.
"""

from __future__ import annotations

import struct
from typing import Final

import torch
from torch import Tensor

from zero_comm.lossless.block_frame import (
    BLOCK_NUMEL,
    ITEMSIZES,
    Coding,
    descriptors_nbytes,
    max_buffer_nbytes,
)
from zero_comm.lossless.codec import find_codec
from zero_comm.quantizer.checksum import checksums
from zero_comm.quantizer.message import CorruptMessageError

HEADER_NBYTES: Final = 48
_ALIGNMENT: Final = 16
_SHORTEST_NBYTES: Final = 4096
_FIXED: Final = "=2sBBIqqq"
_LENGTHS: Final = "=qq"
_LENGTHS_AT: Final = struct.calcsize(_FIXED)
_LETTERS: Final = {"differences": b"ZD", "values": b"ZV"}
# What is sent, whose it may be instead, what ranks may differ in, and what the bytes are not.
_WORDS: Final = {
    "differences": ("differences", "of other weights", "versions", "differences"),
    "values": ("gradients", "of another unit", "model", "coded values"),
}


def message_nbytes(buffer_nbytes: int) -> int:
    """Return the bytes of a message with a buffer of so many, a multiple of 16."""
    return HEADER_NBYTES + -(-buffer_nbytes // _ALIGNMENT) * _ALIGNMENT


def max_message_nbytes(numel: int, itemsize: int) -> int:
    """Return the most bytes that a message of ``numel`` elements may have."""
    return message_nbytes(max_buffer_nbytes(numel, itemsize))


def is_worthwhile(dtype: torch.dtype, numel: int) -> bool:
    """Whether ``numel`` elements may be sent as a message: it is never 1.02 times as long as they.

    Less than 4 KiB would wait longer for a message's length.
    """
    return dtype.itemsize in ITEMSIZES and numel * dtype.itemsize >= _SHORTEST_NBYTES


def pack(
    coding: Coding, *operands: Tensor, message: Tensor, versions: tuple[int, int] = (0, 0)
) -> int:
    """Write a message and return its bytes, a multiple of 16. On an accelerator the host waits.

    ``operands`` are those of `zero_comm.lossless.codec.Codec.encode`. ``message`` is uint8,
    `max_message_nbytes` long, at a multiple of 16 bytes, undefined past the result.
    """
    values = operands[-1]
    codec = find_codec(coding, values.device)
    nbytes = int(codec.encode(*operands, out=message[HEADER_NBYTES:]))
    total = message_nbytes(nbytes)
    message[HEADER_NBYTES + nbytes : total] = 0
    lengths = struct.pack(_LENGTHS, nbytes, int(checksums(message[HEADER_NBYTES:total])))
    header = bytearray(_fixed_part(coding, values, versions) + lengths)
    message[:HEADER_NBYTES] = torch.frombuffer(header, dtype=torch.uint8).to(message.device)
    return total


def unpack(
    coding: Coding,
    message: Tensor,
    values: Tensor,
    *,
    sender: int,
    versions: tuple[int, int] = (0, 0),
) -> None:
    """Change flat ``values`` from the first version to the second, or fill them.

    ``message`` may be longer than the message, at a multiple of 16 bytes. CorruptMessageError says
    that it is damaged or of other elements or versions. ``values`` have changed then only if the
    bytes are wrong in spite of their checksum.
    """
    name, others, differing, meaning = _WORDS[coding]
    try:
        buffer = _checked_buffer(coding, message, values, versions)
        if not find_codec(coding, values.device).decode(buffer, values):
            raise CorruptMessageError(f"its bytes are not {meaning}")
    except CorruptMessageError as error:
        raise CorruptMessageError(
            f"the message of {name} of rank {sender} is damaged or {others}: {error}. If all ranks "
            f"have the same {differing} and settings, suspect memory or the network"
        ) from error


def _checked_buffer(
    coding: Coding, message: Tensor, values: Tensor, versions: tuple[int, int]
) -> Tensor:
    """Return the buffer of a message for ``values``, after all checks."""
    header = bytes(message[:HEADER_NBYTES].tolist())
    if len(header) < HEADER_NBYTES:
        raise CorruptMessageError(f"it has {len(header)} bytes")
    expected = _fixed_part(coding, values, versions)
    if header[:_LENGTHS_AT] != expected:
        found, wanted = (struct.unpack(_FIXED, h[:_LENGTHS_AT]) for h in (header, expected))
        raise CorruptMessageError(f"its header says {found}; expected {wanted}")
    nbytes, checksum = struct.unpack_from(_LENGTHS, header, _LENGTHS_AT)
    least = descriptors_nbytes(values.numel())
    most = max_buffer_nbytes(values.numel(), values.element_size())
    if not least <= nbytes <= most or message_nbytes(nbytes) > message.numel():
        raise CorruptMessageError(
            f"its header says that {nbytes} bytes follow, of {least} to {most} that may, and "
            f"{message.numel() - HEADER_NBYTES} arrived"
        )
    if int(checksums(message[HEADER_NBYTES : message_nbytes(nbytes)])) != checksum:
        raise CorruptMessageError("its checksum does not match its bytes")
    return message[HEADER_NBYTES : HEADER_NBYTES + nbytes]


def _fixed_part(coding: Coding, values: Tensor, versions: tuple[int, int]) -> bytes:
    """Return the part of the header that sender and receiver must agree on."""
    facts = 1, values.element_size(), BLOCK_NUMEL, values.numel()
    return struct.pack(_FIXED, _LETTERS[coding], *facts, *versions)


class GradientMessages:
    """Packs what a reduction sends: a `zero_comm.transport.protocol.SliceCodec`."""

    def serves(self, dtype: torch.dtype, numel: int) -> bool:
        """Whether slices of ``numel`` elements are coded."""
        return is_worthwhile(dtype, numel)

    def max_nbytes(self, dtype: torch.dtype, numel: int) -> int:
        """Return the most bytes that a message of ``numel`` elements may have."""
        return max_message_nbytes(numel, dtype.itemsize)

    def pack(self, values: Tensor, message: Tensor) -> int:
        """Write the message of ``values``, flat and contiguous, and return its bytes.

        On an accelerator the host waits for the length, a multiple of 16.
        """
        return pack("values", values, message=message)

    def unpack(self, message: Tensor, values: Tensor, *, sender: int) -> None:
        """Fill ``values`` from the message of rank ``sender``, at a multiple of 16 bytes."""
        unpack("values", message, values, sender=sender)
