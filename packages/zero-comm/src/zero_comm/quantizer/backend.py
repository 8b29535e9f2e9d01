"""Quantizer backends and the choice of one for a device.

All produce the bytes and values of [Note: the quantized buffer] in `block_format`:

    torch     plain torch operations, everywhere; the definition
    native    a compiled kernel for host memory, a part of the wheel
    triton    kernels for accelerators that Triton supports

A device is served by the fastest backend available: native on the host, triton on CUDA's, ROCm's
and XPU's devices, else torch. The environment variable ``ZERO_COMM_BACKEND`` forces one and is read
at every call. Forcing one that is not available is an error.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Final, Protocol

import torch
from torch import Tensor

from zero_comm.quantizer.block_format import BlockFormat

_log = logging.getLogger(__name__)
_VARIABLE: Final = "ZERO_COMM_BACKEND"


class Backend(Protocol):
    """Quantizes and dequantizes rows. Callers check arguments and disable gradients.

    ``x`` and ``out`` are k rows of n elements each, contiguous, fp32, bf16, fp16 or fp64, k and n
    possibly 0; their addresses are multiples of their element's size alone. ``rows`` is uint8,
    [groups, rows of a group, ``fmt.nbytes(n)``] with k rows in all, each contiguous and starting
    at a multiple of 16; or two-dimensional, one group. Bytes between rows are left unchanged. All
    are on one device and don't overlap.
    """

    @property
    def name(self) -> str:
        """Name in ``ZERO_COMM_BACKEND``."""

    def encode(self, x: Tensor, rows: Tensor, fmt: BlockFormat, seed: int | None) -> bool | None:
        """Quantize row by row into every byte of ``rows``, the padding included.

        A ``seed``, 0 to 2**32 - 1, rounds stochastically. Return whether ``x`` has NaN or Inf, None
        where knowing would synchronize with a device.
        """

    def decode(self, rows: Tensor, out: Tensor, fmt: BlockFormat) -> None:
        """Dequantize row by row to fp32, and round to ``out``'s dtype."""

    def decode_sum(self, rows: Tensor, out: Tensor, fmt: BlockFormat) -> None:
        """Fill each group's row of fp32 ``out`` with its row 0 + row 1 + ..., in this order.

        ``out`` is [groups, n], or 1-D for two-dimensional ``rows``. A group has at least one row.
        """


def backend(device: torch.device | str = "cpu") -> str:
    """Return the name of the backend for tensors on ``device``: "torch", "native" or "triton".

    Raises:
        ValueError: ``ZERO_COMM_BACKEND`` names one that doesn't exist or isn't available.
    """
    forced = os.environ.get(_VARIABLE, "").strip().lower()
    if not forced:
        fastest = _FASTEST.get(torch.device(device).type, "torch")
        return fastest if _is_available(fastest) else "torch"
    if forced not in _BACKENDS:
        raise ValueError(f"{_VARIABLE} must be one of {', '.join(_BACKENDS)}, got {forced!r}")
    if not _is_available(forced):
        problem = _BACKENDS[forced][1]
        raise ValueError(f"{_VARIABLE} is {forced!r}, but {problem}; unset it, or set 'torch'")
    return forced


def find_backend(device: torch.device) -> Backend:
    """Return the backend for tensors on ``device``. Raises the errors of `backend`."""
    found: Backend = import_module(f"zero_comm.quantizer.{backend(device)}_backend").BACKEND
    return found


def warn_without_kernels() -> None:
    """Log a warning if the package was built where there was no compiler."""
    if not _is_available("native"):
        _log.warning(
            "zero_comm was installed without its compiled kernels: plain torch quantizes host "
            "memory, with the same bytes but slower; to have them, install a C++ compiler and then "
            "zero-comm again"
        )


# By type of device. torch's name of ROCm's devices is "cuda".
_FASTEST: Final = {"cpu": "native", "cuda": "triton", "xpu": "triton"}

# The module that a backend requires, and the problem where that is missing.
_BACKENDS: Final = {
    "torch": ("torch", ""),
    "native": (
        "zero_comm._kernels",
        "the compiled module zero_comm._kernels isn't there (install the package)",
    ),
    "triton": ("triton", "triton isn't installed"),
}


@cache
def _is_available(name: str) -> bool:
    return find_spec(_BACKENDS[name][0]) is not None
