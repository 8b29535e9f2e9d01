"""Lossless codecs, the choice of one for a device, and checked functions.

See [Note: the block frame] in `zero_comm.lossless.block_frame`. Backends are those of
`zero_comm.quantizer.backend`, and ``ZERO_COMM_BACKEND`` forces one here too.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from zero_comm.lossless.block_frame import ITEMSIZES, Coding, max_buffer_nbytes
from zero_comm.quantizer.backend import backend


class Codec(Protocol):
    """Encodes and decodes one coding. Callers check arguments.

    Tensors are flat, contiguous, of one device, and don't overlap. Elements have 2 or 4 bytes.
    """

    @property
    def name(self) -> str:
        """Name in ``ZERO_COMM_BACKEND``."""

    def encode(self, *operands: Tensor, out: Tensor, num_threads: int | None = None) -> Tensor:
        """Code the last operand, and return how many bytes were written.

        ``operands`` are the old and the new elements of differences, of one dtype and length; else
        the values. ``out`` is uint8, `max_buffer_nbytes` long, at an even address, undefined past
        the result. That is int64, 0-dim, on the tensors' device. ``num_threads`` are those of a
        compiled kernel on the host, None for as many as torch has.
        """

    def decode(self, buffer: Tensor, values: Tensor) -> Tensor:
        """Change ``values`` from the old to the new ones, or fill them. Triton's doesn't wait.

        ``buffer`` has exactly the bytes that were written, at an even address. Return whether an
        encoder may have written them: bool, 0-dim, on the tensors' device. Where not, ``values``
        are undefined.
        """


def find_codec(coding: Coding, device: torch.device) -> Codec:
    """Return the codec for tensors on ``device``. Raises the errors of `zero_comm.backend`."""
    module = import_module(f"zero_comm.lossless.{backend(device)}_codec")
    found: Codec = module.CODECS[coding]
    return found


def encode_difference(old: Tensor, new: Tensor) -> Tensor:
    """Encode what changed from ``old`` to ``new``, so that no bit is lost.

    16 bits and 32 bits of any dtype; NaN, signed zeros and denormals are kept as they are. See
    [Note: the difference buffer] for the bytes. At most ``2 / 256`` bytes per element are added to
    the elements' own.

    Args:
        old: any shape.
        new: of the same shape, dtype and device.

    Returns:
        The bytes: uint8, 1-D, on the tensors' device.

    Raises:
        ValueError: the two don't match, or their elements have neither 2 nor 4 bytes.
    """
    _check_itemsize("old", old)
    if (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
        raise ValueError(
            f"new must be as old, {list(old.shape)} of {old.dtype} on {old.device}, got "
            f"{list(new.shape)} of {new.dtype} on {new.device}"
        )
    return _encode("differences", old, new)


def apply_difference(values: Tensor, difference: Tensor) -> None:
    """Change ``values`` in place by what `encode_difference` made.

    Args:
        values: contiguous; the bits of the old tensor.
        difference: uint8, 1-D, on the device of ``values``.

    Raises:
        ValueError: an argument that doesn't fit, or bytes that `encode_difference` did not make for
            such a tensor; ``values`` may have changed in part then.
    """
    _decode("differences", "difference", difference, values)


def encode_values(values: Tensor) -> Tensor:
    """Code a tensor so that no bit is lost: gradients take about 11 of the 16 bits of bfloat16.

    16 bits and 32 bits of any dtype; NaN, signed zeros and denormals are kept as they are. See
    [Note: the value buffer] for the bytes. At most ``2 / 256`` bytes per element are added to the
    elements' own.

    Args:
        values: any shape.

    Returns:
        The bytes: uint8, 1-D, on the tensor's device.

    Raises:
        ValueError: elements have neither 2 nor 4 bytes.
    """
    _check_itemsize("values", values)
    return _encode("values", values)


def decode_values(buffer: Tensor, values: Tensor) -> None:
    """Fill ``values`` with what `encode_values` coded.

    Args:
        buffer: uint8, 1-D, on the device of ``values``.
        values: contiguous, of the number and size of elements that were coded; overwritten.

    Raises:
        ValueError: an argument that doesn't fit, or bytes that `encode_values` did not make for
            such a tensor; ``values`` are undefined then.
    """
    _decode("values", "buffer", buffer, values)


def _encode(coding: Coding, *operands: Tensor) -> Tensor:
    flat = [_flat(x.detach().contiguous()) for x in operands]
    nbytes = max_buffer_nbytes(flat[0].numel(), flat[0].element_size())
    out = torch.empty(nbytes, dtype=torch.uint8, device=flat[0].device)
    length = find_codec(coding, out.device).encode(*flat, out=out)
    return out[: int(length)].clone()


def _decode(coding: Coding, name: str, buffer: Tensor, values: Tensor) -> None:
    _check_itemsize("values", values)
    if not values.is_contiguous():
        raise ValueError(f"values must be contiguous, got strides {values.stride()}")
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.device != values.device:
        raise ValueError(
            f"{name} must be 1-D uint8 on {values.device}, got {buffer.dtype} of "
            f"{list(buffer.shape)} on {buffer.device}"
        )
    aligned = buffer if buffer.data_ptr() % 2 == 0 else buffer.clone()
    codec = find_codec(coding, values.device)
    if not codec.decode(aligned.contiguous(), _flat(values.detach())):
        raise ValueError(
            f"{name} is damaged, or of another tensor: its {buffer.numel()} bytes do not describe "
            f"{values.numel()} elements of {values.dtype}"
        )


def _check_itemsize(name: str, x: Tensor) -> None:
    if x.element_size() not in ITEMSIZES:
        raise ValueError(f"{name} must have elements of 2 or 4 bytes, got {x.dtype}")


def _flat(x: Tensor) -> Tensor:
    """View contiguous ``x`` as one dimension. A single element may have any stride till then."""
    return x.as_strided((x.numel(),), (1,))
