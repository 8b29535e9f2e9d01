"""Messages of losslessly coded weights and gradients, which the receiver checks.

[Note: the sealed message]
A header of 48 bytes in native byte order precedes a buffer of [Note: the block frame]. Zeros pad
the buffer to a multiple of 16 bytes. The header has these fields (offset, bytes, contents)::

    0   2  ZD for differences, ZV for values
    2   1  version of this layout: 1
    3   1  bytes of an element
    4   4  elements of a block
    8   8  number of elements
    16  16 old and new version of the weights; zeros for values
    32  8  size of the buffer in bytes, without padding
    40  8  checksum of the padded buffer (`zero_comm.quantizer.checksum`) XOR that size

Every message has a checksum, because a damaged difference would corrupt all later weights
unnoticed. Appended zeros do not change the checksum, so the XOR protects the size as well.

[Note: checks on a device]
A host compares header and checksum before it decodes a message. With an accelerator this would make
the host wait for the device, so all messages are decoded and `Checks` keeps the results on it.
An engine adds the number of damaged messages to the statistics that all ranks sum in a step, before
it decides on the update. Later messages count in the next step. Messages of an evaluation after the
last step are never counted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, TypeVar

import torch
from torch import Tensor

from zero_comm.lossless import block_frame as frame
from zero_comm.lossless.block_frame import Coding
from zero_comm.lossless.codec import find_codec
from zero_comm.quantizer.checksum import checksums
from zero_comm.quantizer.message import CorruptMessageError, fill_words

_Count = TypeVar("_Count", int, Tensor)
HEADER_NBYTES: Final = 48
_ALIGNMENT: Final = 16
_SHORTEST_NBYTES: Final = 4096
_FIXED: Final = "=2sBBIqqq"
_LENGTHS: Final = "=qq"
_LENGTHS_AT: Final = struct.calcsize(_FIXED)
_LETTERS: Final = {"differences": b"ZD", "values": b"ZV"}
# Phrases of error messages: the contents, a wrong origin, what ranks must share, expected bytes.
_WORDS: Final = {
    "differences": ("differences", "of other weights", "versions", "differences"),
    "values": ("gradients", "of another unit", "model", "coded values"),
}


class Checks:
    """`zero_core.protocols.MessageChecks` of a rank's messages. See [Note: checks on a device]."""

    def __init__(self) -> None:
        self._found: list[tuple[Tensor, int, Sequence[int], Coding]] = []
        self._num_counted = 0

    def add(self, is_good: Tensor, unit: int, senders: Sequence[int], coding: Coding) -> None:
        """Keep ``is_good``, bool [senders] on a device: whether each sender's message is sound."""
        self._found.append((is_good, unit, senders, coding))

    def num_damaged(self) -> Tensor | None:
        self._num_counted = len(self._found)
        if not self._found:
            return None
        return (~torch.cat([is_good for is_good, *_ in self._found])).sum()

    def take(self) -> list[tuple[int, str]]:
        found = self._found[: self._num_counted]
        self.clear()
        return [
            (unit, _damaged(coding, sender, "its header or checksum is wrong"))
            for is_good, unit, senders, coding in found
            for sender, good in zip(senders, is_good.tolist(), strict=True)
            if not good
        ]

    def clear(self) -> None:
        del self._found[: self._num_counted]
        self._num_counted = 0


def message_nbytes(buffer_nbytes: _Count) -> _Count:
    """Return the size in bytes, a multiple of 16, of a message with a buffer of this size."""
    return HEADER_NBYTES + -(-buffer_nbytes // _ALIGNMENT) * _ALIGNMENT


def max_message_nbytes(numel: int, itemsize: int) -> int:
    return message_nbytes(frame.max_buffer_nbytes(numel, itemsize))


def is_worthwhile(dtype: torch.dtype, numel: int) -> bool:
    """Whether to send ``numel`` elements as a message, which may be longer by up to 2%."""
    # Below 4 KiB the exchange of message lengths takes longer than a message saves.
    return dtype.itemsize in frame.ITEMSIZES and numel * dtype.itemsize >= _SHORTEST_NBYTES


def pack(
    coding: Coding, *operands: Tensor, message: Tensor, versions: tuple[int, int] = (0, 0)
) -> Tensor:
    """Write a message, and return its size in bytes, a multiple of 16: int64, 0-dim, on the device.

    ``operands`` are those of `zero_comm.lossless.codec.Codec.encode`. ``message`` is uint8, has
    `max_message_nbytes` bytes and starts at a multiple of 16. Zeros fill its remaining bytes on an
    accelerator. On a host they are undefined.
    """
    values, buffer = operands[-1], message[HEADER_NBYTES:]
    nbytes = find_codec(coding, values.device).encode(*operands, out=buffer)
    if message.is_cpu:
        buffer = message[HEADER_NBYTES : message_nbytes(int(nbytes))]
        buffer[int(nbytes) :] = 0
    words = message[:HEADER_NBYTES].view(torch.int64)
    words[:4] = fill_words(_fixed_part(coding, values, versions), message.device)
    words[4], words[5] = nbytes, nbytes ^ checksums(buffer)
    return message_nbytes(nbytes)


def unpack(
    coding: Coding,
    rows: Tensor,
    values: Sequence[Tensor],
    *,
    senders: Sequence[int],
    unit: int,
    checks: Checks,
    versions: tuple[int, int] = (0, 0),
    own: int | None = None,
) -> None:
    """Decode ``rows``, uint8 [senders, bytes], into the flat tensors at their index of ``values``.

    For differences, ``values`` hold the old version. The row of sender ``own`` is not decoded. Rows
    start at multiples of 16 bytes and may have extra bytes at their end, which are zeros on an
    accelerator. On a host, a damaged message, or one whose header has another coding, element size,
    number of elements or versions, raises CorruptMessageError. Its tensor is then unchanged, unless
    wrong bytes have the right checksum. On an accelerator the results of the checks are added to
    ``checks`` instead.
    """
    codec, each = find_codec(coding, rows.device), zip(rows, values, senders, strict=True)
    if rows.is_cpu:
        for message, into, sender in each:
            try:
                if sender != own:
                    buffer = _checked_buffer(coding, message, into, versions)
                    if int(codec.decode(buffer, into)) != len(buffer):
                        raise CorruptMessageError(f"its bytes are not {_WORDS[coding][3]}")
            except CorruptMessageError as error:
                raise CorruptMessageError(_damaged(coding, sender, error)) from error
        return
    words = rows.view(torch.int64)
    expected = fill_words(_fixed_part(coding, values[0], versions), rows.device)
    is_good = (words[:, :4] == expected).all(1)
    is_good &= words[:, 4] ^ checksums(rows[:, HEADER_NBYTES:]) == words[:, 5]
    lengths = [
        word if sender == own else codec.decode(message[HEADER_NBYTES:], into)
        for word, (message, into, sender) in zip(words[:, 4], each, strict=True)
    ]
    is_good &= torch.stack(lengths) == words[:, 4]
    checks.add(is_good, unit, senders, coding)


def _damaged(coding: Coding, sender: int, why: object) -> str:
    name, others, differing, _ = _WORDS[coding]
    return (
        f"the message of {name} of rank {sender} is damaged or {others}: {why}. If all ranks "
        f"have the same {differing} and settings, suspect memory or the network"
    )


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
    if nbytes ^ int(checksums(message[HEADER_NBYTES : message_nbytes(nbytes)])) != checksum:
        raise CorruptMessageError("its checksum does not match its bytes")
    return message[HEADER_NBYTES : HEADER_NBYTES + nbytes]


def _fixed_part(coding: Coding, values: Tensor, versions: tuple[int, int]) -> bytes:
    """Return the first 32 bytes of the header, which sender and receiver must agree on."""
    facts = 1, values.element_size(), frame.BLOCK_NUMEL, values.numel()
    return struct.pack(_FIXED, _LETTERS[coding], *facts, *versions)


class GradientMessages:
    """`SliceCodec` of value messages, whose addresses must be multiples of 16."""

    def __init__(self, checks: Checks) -> None:
        self.checks = checks

    def serves(self, dtype: torch.dtype, numel: int) -> bool:
        return is_worthwhile(dtype, numel)

    def max_nbytes(self, dtype: torch.dtype, numel: int) -> int:
        return max_message_nbytes(numel, dtype.itemsize)

    def pack(self, values: Tensor, message: Tensor) -> Tensor:
        return pack("values", values, message=message)

    def unpack(self, message: Tensor, values: Tensor, *, sender: int, unit: int) -> None:
        rows, checks = message.view(1, -1), self.checks
        unpack("values", rows, [values], senders=[sender], unit=unit, checks=checks)
