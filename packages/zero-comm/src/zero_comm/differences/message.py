"""Messages of lossless differences: a header and a difference buffer, checked before their use.

[Note: the message of differences]
A header of 48 bytes, in native byte order, and then a difference buffer (see
`zero_comm.differences.difference_format`), padded with zeros to a multiple of 16 bytes::

    0   2  the letters ZD
    2   1  version of this layout: 1
    3   1  bytes of an element
    4   4  elements of a block
    8   8  elements
    16  8  version of the values that the differences start from
    24  8  version of the values that they lead to
    32  8  bytes of the difference buffer
    40  8  checksum of the padded difference buffer

Its receiver holds the values of the first version and checks everything before it changes them: it
would not notice later. The checksum (`zero_comm.quantizer.checksum`) takes little time, since a
message is short.
"""

from __future__ import annotations

import struct
from typing import Final

import torch
from torch import Tensor

from zero_comm.differences.codec import find_codec
from zero_comm.differences.difference_format import (
    BLOCK_NUMEL,
    ITEMSIZES,
    descriptors_nbytes,
    max_difference_nbytes,
)
from zero_comm.quantizer.checksum import checksums
from zero_comm.quantizer.message import CorruptMessageError

HEADER_NBYTES: Final = 48
ALIGNMENT: Final = 16
_FIXED: Final = "=2sBBIqqq"
_LENGTHS: Final = "=qq"
_LENGTHS_AT: Final = struct.calcsize(_FIXED)
_SHORTEST_NBYTES: Final = 4096


def max_message_nbytes(numel: int, itemsize: int) -> int:
    """Return the most bytes that a message of ``numel`` elements may have."""
    return HEADER_NBYTES + _padded(max_difference_nbytes(numel, itemsize))


def is_worthwhile(dtype: torch.dtype, numel: int) -> bool:
    """Whether values may be sent as differences: those that change are never 1.02 times as long."""
    return dtype.itemsize in ITEMSIZES and numel * dtype.itemsize >= _SHORTEST_NBYTES


def pack_difference(old: Tensor, new: Tensor, message: Tensor, *, versions: tuple[int, int]) -> int:
    """Write a message. On an accelerator the host waits for its length.

    Args:
        old: flat, contiguous.
        new: as ``old``.
        message: uint8, `max_message_nbytes` long, at a multiple of 16 bytes; its bytes past the
            result are undefined.
        versions: of ``old`` and of ``new``.

    Returns:
        The message's bytes, a multiple of 16.
    """
    codec, body = find_codec(old.device), message[HEADER_NBYTES:]
    nbytes = int(codec.encode(old, new, body))
    body[nbytes : _padded(nbytes)] = 0
    body = body[: _padded(nbytes)]
    fixed = struct.pack(_FIXED, *_facts(old), *versions)
    lengths = struct.pack(_LENGTHS, nbytes, int(checksums(body)))
    header = torch.frombuffer(bytearray(fixed + lengths), dtype=torch.uint8)
    message[:HEADER_NBYTES] = header.to(message.device)
    return HEADER_NBYTES + len(body)


def unpack_difference(
    message: Tensor, values: Tensor, *, versions: tuple[int, int], sender: int
) -> None:
    """Change ``values``, of the first version, to those of the second one.

    Args:
        message: uint8, as long as the message or longer, at a multiple of 16 bytes.
        values: flat, contiguous; overwritten.
        versions: that this rank expects.
        sender: the rank that sent it.

    Raises:
        CorruptMessageError: the message is damaged or of other versions. ``values`` have changed
            only if the bytes are wrong in spite of their checksum.
    """
    header = bytes(message[:HEADER_NBYTES].tolist())
    if len(header) < HEADER_NBYTES:
        raise _damaged(sender, f"it has {len(header)} bytes")
    expected = struct.pack(_FIXED, *_facts(values), *versions)
    if header[:_LENGTHS_AT] != expected:
        found, wanted = (struct.unpack(_FIXED, h[:_LENGTHS_AT]) for h in (header, expected))
        raise _damaged(sender, f"its header says {found}; expected {wanted}")
    nbytes, checksum = struct.unpack_from(_LENGTHS, header, _LENGTHS_AT)
    least = descriptors_nbytes(values.numel())
    most = max_difference_nbytes(values.numel(), values.element_size())
    if not least <= nbytes <= most or HEADER_NBYTES + _padded(nbytes) > message.numel():
        raise _damaged(
            sender,
            f"its header says that {nbytes} bytes follow, of {least} to {most} that may, and "
            f"{message.numel() - HEADER_NBYTES} arrived",
        )
    body = message[HEADER_NBYTES : HEADER_NBYTES + _padded(nbytes)]
    if int(checksums(body)) != checksum:
        raise _damaged(sender, "its checksum does not match its bytes")
    if not find_codec(values.device).decode(body[:nbytes], values):
        raise _damaged(sender, "its bytes are not differences")


def _facts(values: Tensor) -> tuple[bytes, int, int, int, int]:
    return b"ZD", 1, values.element_size(), BLOCK_NUMEL, values.numel()


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _damaged(sender: int, what: str) -> CorruptMessageError:
    return CorruptMessageError(
        f"the message of differences of rank {sender} is damaged or of other weights: {what}. If "
        "all ranks have the same versions and settings, suspect memory or the network"
    )
