"""Codec for parameters that are uploaded from host memory to a device as lossless differences.

Entry point ``lossless`` of the group ``zero_core.upload_codecs``. The host encodes, and does not
wait for the device, which decodes. Differences have no header, because they stay in one process.
"""

from __future__ import annotations

from torch import Tensor

from zero_comm.lossless.block_frame import ITEMSIZES, max_buffer_nbytes
from zero_comm.lossless.codec import find_codec
from zero_comm.quantizer.checksum import checksum_of


class UploadCodec:
    """`zero_offload.protocols.UploadCodec` over `zero_comm.lossless.codec`, for flat tensors."""

    def max_nbytes(self, numel: int, itemsize: int) -> int:
        """Return the largest size of a difference, or 0 if elements do not have 2 or 4 bytes."""
        return max_buffer_nbytes(numel, itemsize) if itemsize in ITEMSIZES else 0

    def checksum(self, values: Tensor) -> Tensor:
        return checksum_of(values)

    def encode(self, old: Tensor, new: Tensor, out: Tensor, *, num_threads: int) -> int:
        """Write the difference from ``old`` to ``new``, both in host memory, and return its bytes.

        ``out`` is uint8, has `max_nbytes` bytes and an even address. Later bytes are undefined.
        """
        codec = find_codec("differences", old.device)
        return int(codec.encode(old, new, out=out, num_threads=num_threads))

    def decode(self, difference: Tensor, values: Tensor) -> None:
        """Apply a difference to the old ``values`` in place, on their device's current stream."""
        find_codec("differences", values.device).decode(difference, values)
