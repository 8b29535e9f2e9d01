"""Messages of losslessly coded weights and gradients, which the receiver checks before use.

[Note: the sealed message]
A header of 48 bytes in native byte order precedes a buffer of [Note: the block frame]. Zeros pad
the buffer to a multiple of 16 bytes. The header has these fields (offset, bytes, contents)::

    0   2  ZD for differences, ZV for values
    2   1  version of this layout: 1
    3   1  bytes of an element
    4   4  elements of a block
    8   8  number of elements
    16  16 old and new version of the weights; zeros for values
    32  8  bytes of the buffer
    40  8  checksum of the padded buffer (`zero_comm.quantizer.checksum`)

Every message has a checksum, because a damaged difference would corrupt all later weights
unnoticed.
"""

from __future__ import annotations

import struct
from typing import Final

import torch
from torch import Tensor

from zero_comm.lossless import block_frame as frame
from zero_comm.lossless.block_frame import Coding
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
# Parts of error messages: the contents, another origin, what ranks must share, the expectation.
_WORDS: Final = {
    "differences": ("differences", "of other weights", "versions", "differences"),
    "values": ("gradients", "of another unit", "model", "coded values"),
}


def message_nbytes(buffer_nbytes: int) -> int:
    """Return the bytes of a message with a buffer of ``buffer_nbytes``, a multiple of 16."""
    return HEADER_NBYTES + -(-buffer_nbytes // _ALIGNMENT) * _ALIGNMENT


def max_message_nbytes(numel: int, itemsize: int) -> int:
    return message_nbytes(frame.max_buffer_nbytes(numel, itemsize))


def is_worthwhile(dtype: torch.dtype, numel: int) -> bool:
    """Whether ``numel`` elements should be sent as a message, which may be up to 2% longer.

    Below 4 KiB the exchange of message lengths would take longer than the message saves.
    """
    return dtype.itemsize in frame.ITEMSIZES and numel * dtype.itemsize >= _SHORTEST_NBYTES


def pack(
    coding: Coding, *operands: Tensor, message: Tensor, versions: tuple[int, int] = (0, 0)
) -> int:
    """Write a message and return its bytes, a multiple of 16. The host waits for an accelerator.

    ``operands`` are those of `zero_comm.lossless.codec.Codec.encode`. ``message`` is uint8, has
    `max_message_nbytes` bytes and starts at a multiple of 16. Bytes after the result are undefined.
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
    """Decode a message into flat ``values``, which hold the old version of a difference.

    ``message`` starts at a multiple of 16 bytes and may have extra bytes at its end. Raises
    CorruptMessageError if the message is damaged or belongs to other elements or versions.
    ``values`` are unchanged then, unless wrong bytes have the right checksum.
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
    header = bytes(message[:HEADER_NBYTES].tolist())
    if len(header) < HEADER_NBYTES:
        raise CorruptMessageError(f"it has {len(header)} bytes")
    expected = _fixed_part(coding, values, versions)
    if header[:_LENGTHS_AT] != expected:
        found, wanted = (struct.unpack(_FIXED, h[:_LENGTHS_AT]) for h in (header, expected))
        raise CorruptMessageError(f"its header says {found}; expected {wanted}")
    nbytes, checksum = struct.unpack_from(_LENGTHS, header, _LENGTHS_AT)
    least = frame.descriptors_nbytes(values.numel())
    most = frame.max_buffer_nbytes(values.numel(), values.element_size())
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
    facts = 1, values.element_size(), frame.BLOCK_NUMEL, values.numel()
    return struct.pack(_FIXED, _LETTERS[coding], *facts, *versions)


class GradientMessages:
    """`zero_comm.transport.protocol.SliceCodec` for the gradient slices that a reduction sends.

    Messages are at multiples of 16 bytes. On an accelerator `pack` waits for the message's length.
    """

    def serves(self, dtype: torch.dtype, numel: int) -> bool:
        return is_worthwhile(dtype, numel)

    def max_nbytes(self, dtype: torch.dtype, numel: int) -> int:
        return max_message_nbytes(numel, dtype.itemsize)

    def pack(self, values: Tensor, message: Tensor) -> int:
        return pack("values", values, message=message)

    def unpack(self, message: Tensor, values: Tensor, *, sender: int) -> None:
        unpack("values", message, values, sender=sender)
