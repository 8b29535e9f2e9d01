"""Codec interface and the public lossless functions.

[Note: the block frame] in `zero_comm.lossless.block_frame` defines the bytes. Codecs have the names
of the backends in `zero_comm.quantizer.backend`, and ``ZERO_COMM_BACKEND`` selects one here too.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from zero_comm.lossless.block_frame import ITEMSIZES, Coding, max_buffer_nbytes
from zero_comm.quantizer.backend import backend


class Codec(Protocol):
    """Encoder and decoder of one coding, which never wait for a device. Callers check arguments.

    Tensors are flat, contiguous, on one device, and do not overlap. Elements have 2 or 4 bytes.
    """

    name: str  # as in ``ZERO_COMM_BACKEND``

    def encode(self, *operands: Tensor, out: Tensor, num_threads: int | None = None) -> Tensor:
        """Encode the last operand into ``out``, and return the number of bytes written.

        The difference coding has two operands, the old and the new elements, of one dtype and
        length. The value coding has one operand. ``out`` is uint8, has `max_buffer_nbytes` bytes
        and an even address. Its bytes after the encoding are undefined with the compiled codec, and
        zeros with the others. The result is an int64 scalar on the same device. Only the compiled
        codec uses ``num_threads``. None means torch's thread count.
        """

    def measure(self, *operands: Tensor) -> Tensor:
        """Return the number of bytes that `encode` would write. The compiled codec lacks it."""

    def decode(self, buffer: Tensor, values: Tensor) -> Tensor:
        """Decode ``buffer`` into ``values``, and return the number of bytes of the encoding.

        With the difference coding ``values`` must hold the old elements. ``buffer`` starts at an
        even address with the bytes that `encode` wrote. The result is an int64 scalar on the same
        device. It is negative or exceeds the length of ``buffer`` if the bytes are malformed, and
        ``values`` are then undefined. Only the compiled codec refuses further bytes at the end.
        """


def find_codec(coding: Coding, device: torch.device) -> Codec:
    """Return the codec for tensors on ``device``. Raises the errors of `zero_comm.backend`."""
    found: Codec = import_module(f"zero_comm.lossless.{backend(device)}_codec").CODECS[coding]
    return found


def encode_difference(old: Tensor, new: Tensor) -> Tensor:
    """Encode the change from ``old`` to ``new`` without losing a bit, and return the bytes.

    The dtype may be any of 16 or 32 bits. NaN, signed zeros and denormals keep their bits. [Note:
    the difference buffer] defines the bytes: uint8, 1-D, on the same device. They are longer than
    ``new`` by at most 2 bytes per block of 256 elements, the last of which may be incomplete.

    Args:
        old: any shape.
        new: same shape, dtype and device as ``old``.

    Raises:
        ValueError: the tensors do not match, or their elements do not have 2 or 4 bytes.
    """
    _check_itemsize("old", old)
    if (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
        raise ValueError(
            f"new must be as old, {list(old.shape)} of {old.dtype} on {old.device}, got "
            f"{list(new.shape)} of {new.dtype} on {new.device}"
        )
    return _encode("differences", old, new)


def apply_difference(values: Tensor, difference: Tensor) -> None:
    """Apply a difference from `encode_difference` to ``values`` in place.

    Args:
        values: contiguous, with the bits of the old tensor.
        difference: uint8, 1-D, on the device of ``values``.

    Raises:
        ValueError: an argument does not fit, or the bytes do not describe such a tensor. ``values``
            may then have changed in part.
    """
    _decode("differences", "difference", difference, values)


def encode_values(values: Tensor) -> Tensor:
    """Encode ``values`` of any shape without losing a bit, and return the bytes.

    bf16 gradients take about 11 bits per element. [Note: the value buffer] defines the bytes. The
    dtypes, the largest size and the errors are those of `encode_difference`.
    """
    _check_itemsize("values", values)
    return _encode("values", values)


def decode_values(buffer: Tensor, values: Tensor) -> None:
    """Fill ``values`` with the elements that `encode_values` encoded.

    Arguments and errors are those of `apply_difference`, but ``values`` may have any old contents.
    """
    _decode("values", "buffer", buffer, values)


def _encode(coding: Coding, *operands: Tensor) -> Tensor:
    flat = [_flat(x.detach().resolve_conj().resolve_neg().contiguous()) for x in operands]
    nbytes = max_buffer_nbytes(flat[0].numel(), flat[0].element_size())
    out = torch.empty(nbytes, dtype=torch.uint8, device=flat[0].device)
    length = find_codec(coding, out.device).encode(*flat, out=out)
    return out[: int(length)].clone()


def _decode(coding: Coding, name: str, buffer: Tensor, values: Tensor) -> None:
    _check_itemsize("values", values)
    if not values.is_contiguous():
        raise ValueError(f"values must be contiguous, got strides {values.stride()}")
    if values.is_neg() or values.is_conj():
        raise ValueError("values must be no lazily negated or conjugated view; pass them resolved")
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.device != values.device:
        raise ValueError(
            f"{name} must be 1-D uint8 on {values.device}, got {buffer.dtype} of "
            f"{list(buffer.shape)} on {buffer.device}"
        )
    aligned = buffer if buffer.data_ptr() % 2 == 0 else buffer.clone()
    codec = find_codec(coding, values.device)
    if int(codec.decode(aligned.contiguous(), _flat(values.detach()))) != len(buffer):
        raise ValueError(
            f"{name} is damaged, or of another tensor: its {buffer.numel()} bytes do not describe "
            f"{values.numel()} elements of {values.dtype}"
        )


def _check_itemsize(name: str, x: Tensor) -> None:
    if x.element_size() not in ITEMSIZES:
        raise ValueError(f"{name} must have elements of 2 or 4 bytes, got {x.dtype}")


def _flat(x: Tensor) -> Tensor:
    """View contiguous ``x`` as 1-D with stride 1. torch allows any stride for a single element."""
    return x.as_strided((x.numel(),), (1,))
