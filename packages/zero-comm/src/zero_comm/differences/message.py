"""Messages of lossless differences: a header and a difference buffer, checked before their use.

The header is that of [Note: the sealed message] in `zero_comm.differences.sealed`, with the letters
ZD and the versions that the differences lead from and to. The buffer is that of
`zero_comm.differences.difference_format`. The receiver holds the values of the first version and
checks everything before it changes them: it would not notice later. The checksum takes little time,
since a message is short.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from zero_comm.differences.codec import find_codec
from zero_comm.differences.difference_format import ITEMSIZES, max_difference_nbytes
from zero_comm.differences.sealed import HEADER_NBYTES, seal, sealed_nbytes, unseal
from zero_comm.quantizer.message import CorruptMessageError

_LETTERS: Final = b"ZD"
_SHORTEST_NBYTES: Final = 4096


def max_message_nbytes(numel: int, itemsize: int) -> int:
    """Return the most bytes that a message of ``numel`` elements may have."""
    return sealed_nbytes(max_difference_nbytes(numel, itemsize))


def is_worthwhile(dtype: torch.dtype, numel: int) -> bool:
    """Whether values may be sent as differences: those that change are never 1.02 times as long."""
    return dtype.itemsize in ITEMSIZES and numel * dtype.itemsize >= _SHORTEST_NBYTES


def pack_difference(old: Tensor, new: Tensor, message: Tensor, *, versions: tuple[int, int]) -> int:
    """Write a message and return its bytes, a multiple of 16. On an accelerator the host waits.

    The tensors are flat and contiguous. ``message`` is uint8, `max_message_nbytes` long, at a
    multiple of 16 bytes, undefined past the result.
    """
    nbytes = int(find_codec(old.device).encode(old, new, message[HEADER_NBYTES:]))
    return seal(message, nbytes, _LETTERS, old, versions)


def unpack_difference(
    message: Tensor, values: Tensor, *, versions: tuple[int, int], sender: int
) -> None:
    """Change ``values``, of the first version, to those of the second one.

    ``message`` may be longer than the message, at a multiple of 16 bytes. CorruptMessageError says
    that it is damaged or of other versions. ``values`` have changed then only if the bytes are
    wrong in spite of their checksum.
    """
    most = max_difference_nbytes(values.numel(), values.element_size())
    try:
        buffer = unseal(message, _LETTERS, values, versions, max_nbytes=most)
    except CorruptMessageError as error:
        raise _damaged(sender, str(error)) from error
    if not find_codec(values.device).decode(buffer, values):
        raise _damaged(sender, "its bytes are not differences")


def _damaged(sender: int, what: str) -> CorruptMessageError:
    return CorruptMessageError(
        f"the message of differences of rank {sender} is damaged or of other weights: {what}. If "
        "all ranks have the same versions and settings, suspect memory or the network"
    )
