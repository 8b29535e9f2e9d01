"""Messages of coded gradients, as a transport sends them to other nodes.

The header is that of [Note: the sealed message] in `zero_comm.differences.sealed`, with the letters
ZV and zeros for its numbers. The buffer is that of `zero_comm.values.value_format`.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from zero_comm.differences.difference_format import ITEMSIZES
from zero_comm.differences.sealed import HEADER_NBYTES, seal, sealed_nbytes, unseal
from zero_comm.quantizer.message import CorruptMessageError
from zero_comm.values.codec import find_value_codec
from zero_comm.values.value_format import expected_values_nbytes, max_values_nbytes

_LETTERS: Final = b"ZV"
_NUMBERS: Final = (0, 0)
_SHORTEST_NBYTES: Final = 4096


class GradientMessages:
    """Packs what a reduction sends: a `zero_comm.transport.protocol.SliceCodec`."""

    def serves(self, dtype: torch.dtype, numel: int) -> bool:
        """Whether slices of ``numel`` elements are coded.

        Those of less than 4 KiB are not: they would wait longer for a message's length.
        """
        return dtype.itemsize in ITEMSIZES and numel * dtype.itemsize >= _SHORTEST_NBYTES

    def max_nbytes(self, dtype: torch.dtype, numel: int) -> int:
        """Return the most bytes that a message of ``numel`` elements may have."""
        return sealed_nbytes(max_values_nbytes(numel, dtype.itemsize))

    def pack(self, values: Tensor, message: Tensor) -> int:
        """Write the message of ``values``, flat and contiguous, and return its bytes.

        ``message`` is uint8, `max_nbytes` long, at a multiple of 16 bytes, undefined past the
        result. On an accelerator the host waits for the length, a multiple of 16.
        """
        codec = find_value_codec(values.device)
        nbytes = int(codec.encode(values, message[HEADER_NBYTES:]))
        return seal(message, nbytes, _LETTERS, values, _NUMBERS)

    def unpack(self, message: Tensor, values: Tensor, *, sender: int) -> None:
        """Fill ``values`` from the message of rank ``sender``, at a multiple of 16 bytes.

        CorruptMessageError says that it is damaged, or of other elements. ``values`` have changed
        then only if the bytes are wrong in spite of their checksum.
        """
        most = max_values_nbytes(values.numel(), values.element_size())
        try:
            buffer = unseal(message, _LETTERS, values, _NUMBERS, max_nbytes=most)
        except CorruptMessageError as error:
            raise _damaged(sender, str(error)) from error
        if not find_value_codec(values.device).decode(buffer, values):
            raise _damaged(sender, "its bytes are not coded values")


def expected_message_nbytes(numel: int, itemsize: int) -> int:
    """Return the bytes of a message of gradients of a normal distribution."""
    return sealed_nbytes(expected_values_nbytes(numel, itemsize))


def _damaged(sender: int, what: str) -> CorruptMessageError:
    return CorruptMessageError(
        f"the message of gradients of rank {sender} is damaged or of another unit: {what}. If all "
        "ranks have the same model and settings, suspect memory or the network"
    )
