"""Lossless differences of tensors: codecs, the choice of one for a device, and checked functions.

See [Note: the difference buffer] in `zero_comm.differences.difference_format`. Backends are those
of `zero_comm.quantizer.backend`, and ``ZERO_COMM_BACKEND`` forces one here too.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from zero_comm.differences.difference_format import ITEMSIZES, max_difference_nbytes
from zero_comm.differences.torch_codec import TorchCodec
from zero_comm.quantizer.backend import find_backend_name


class DifferenceCodec(Protocol):
    """Encodes and decodes differences. Callers check arguments.

    Tensors are flat, contiguous, of one device, and don't overlap. Elements have 2 or 4 bytes.
    """

    @property
    def name(self) -> str:
        """Name in ``ZERO_COMM_BACKEND``."""

    def encode(
        self, old: Tensor, new: Tensor, out: Tensor, *, num_threads: int | None = None
    ) -> Tensor:
        """Write the differences of two tensors of one dtype and length, and return how many bytes.

        ``out`` is uint8, `max_difference_nbytes` long, at an even address, undefined past the
        result. That is int64, 0-dim, on the tensors' device. ``num_threads`` are those of a
        compiled kernel on the host, None for as many as torch has.
        """

    def decode(self, buffer: Tensor, values: Tensor) -> Tensor:
        """Change ``values`` from the old to the new ones. Triton's does not wait for the device.

        ``buffer`` has exactly the bytes of the differences, at an even address. Return whether an
        encoder may have written them: bool, 0-dim, on the tensors' device. Where not, some values
        have changed.
        """


def find_codec(device: torch.device) -> DifferenceCodec:
    """Return the codec for tensors on ``device``. Raises the errors of `zero_comm.backend`."""
    return _load(find_backend_name(device))


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
    check_itemsize("old", old)
    if (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
        raise ValueError(
            f"new must be as old, {list(old.shape)} of {old.dtype} on {old.device}, got "
            f"{list(new.shape)} of {new.dtype} on {new.device}"
        )
    old, new = (flat(x.detach().contiguous()) for x in (old, new))
    nbytes = max_difference_nbytes(old.numel(), old.element_size())
    out = torch.empty(nbytes, dtype=torch.uint8, device=old.device)
    length = find_codec(old.device).encode(old, new, out)
    return out[: int(length)].clone()


def apply_difference(values: Tensor, difference: Tensor) -> None:
    """Change ``values`` in place by what `encode_difference` made.

    Args:
        values: contiguous; the bits of the old tensor.
        difference: uint8, 1-D, on the device of ``values``.

    Raises:
        ValueError: an argument that doesn't fit, or bytes that `encode_difference` did not make for
            such a tensor; ``values`` may have changed in part then.
    """
    check_itemsize("values", values)
    if not values.is_contiguous():
        raise ValueError(f"values must be contiguous, got strides {values.stride()}")
    if difference.dtype != torch.uint8 or difference.dim() != 1:
        raise ValueError(
            f"difference must be 1-D uint8, got {difference.dtype} of {list(difference.shape)}"
        )
    if difference.device != values.device:
        raise ValueError(f"difference must be on {values.device}, got {difference.device}")
    buffer = difference if difference.data_ptr() % 2 == 0 else difference.clone()
    if not find_codec(values.device).decode(buffer.contiguous(), flat(values.detach())):
        raise ValueError(
            f"difference is damaged, or of another tensor: its {difference.numel()} bytes do not "
            f"describe {values.numel()} elements of {values.dtype}"
        )


def check_itemsize(name: str, x: Tensor) -> None:
    if x.element_size() not in ITEMSIZES:
        raise ValueError(f"{name} must have elements of 2 or 4 bytes, got {x.dtype}")


def flat(x: Tensor) -> Tensor:
    """View contiguous ``x`` as one dimension. A single element may have any stride till then."""
    return x.as_strided((x.numel(),), (1,))


@cache
def _load(name: str) -> DifferenceCodec:
    if name == "torch":
        return TorchCodec()
    loaded: DifferenceCodec = import_module(f"zero_comm.differences.{name}_codec").CODEC
    return loaded
