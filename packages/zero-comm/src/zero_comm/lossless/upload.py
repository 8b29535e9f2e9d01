"""Lossless differences of parameters on their way from host memory to a device.

Entry point ``lossless`` of the group ``zero_core.upload_codecs``. The host encodes, the device
decodes, and both compute checksums of the values that a difference starts from. The host waits for
none of it where the device has Triton's kernels; plain torch's decoder waits. The bytes never leave
the process, so they have no header.
"""

from __future__ import annotations

from torch import Tensor

from zero_comm.lossless.block_frame import ITEMSIZES, max_buffer_nbytes
from zero_comm.lossless.codec import find_codec
from zero_comm.quantizer.checksum import checksum_of


class UploadCodec:
    """`zero_offload.protocols.UploadCodec` by `zero_comm.lossless.codec`.

    Tensors are 1-D and contiguous.
    """

    def max_nbytes(self, numel: int, itemsize: int) -> int:
        """Return the most bytes of a difference, or 0 where elements are neither 2 nor 4 bytes."""
        return max_buffer_nbytes(numel, itemsize) if itemsize in ITEMSIZES else 0

    def checksum(self, values: Tensor) -> Tensor:
        """Return a checksum of the bytes of ``values``: int64, without dimensions, beside them."""
        return checksum_of(values)

    def encode(self, old: Tensor, new: Tensor, out: Tensor, *, num_threads: int) -> int:
        """Write the difference from ``old`` to ``new``, both in host memory, and return its bytes.

        ``out`` is uint8, `max_nbytes` long, at an even address, undefined past the result.
        """
        codec = find_codec("differences", old.device)
        return int(codec.encode(old, new, out=out, num_threads=num_threads))

    def decode(self, difference: Tensor, values: Tensor) -> None:
        """Change ``values`` from the old to the new ones, on their device's current stream."""
        find_codec("differences", values.device).decode(difference, values)
