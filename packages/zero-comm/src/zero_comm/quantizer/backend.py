"""Quantizer backends, and the selection of one for a device.

All backends produce the bytes and values of [Note: the quantized buffer] in `block_format`:

    torch     plain torch operations for every device; defines the results
    native    compiled kernels for host memory, included in the wheel
    triton    kernels for accelerators that Triton supports

The default is native for host memory, triton for CUDA, ROCm and XPU devices, and torch otherwise or
if the preferred backend is not installed. The environment variable ``ZERO_COMM_BACKEND`` forces a
backend. It is read at every call.
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
    """Quantizes and dequantizes rows. Callers check the arguments and disable gradients.

    ``x`` and ``out`` are [k, n], contiguous, fp32, bf16, fp16 or fp64. k and n may be 0. Their
    addresses are multiples of the element size only. ``rows`` is uint8, [groups, rows per group,
    ``fmt.nbytes(n)``] with k rows in total, or 2-D for a single group. Each row is contiguous and
    starts at a multiple of 16 bytes. Bytes between rows stay unchanged. All tensors are on one
    device and do not overlap.
    """

    name: str  # in ``ZERO_COMM_BACKEND``

    def encode(self, x: Tensor, rows: Tensor, fmt: BlockFormat, seed: int | None) -> bool | None:
        """Quantize ``x`` row by row into ``rows``, including the padding bytes.

        A ``seed``, 0 to 2**32 - 1, selects stochastic rounding. Return whether ``x`` has NaN or
        Inf, or None if finding out would make the host wait for a device.
        """

    def decode(self, rows: Tensor, out: Tensor, fmt: BlockFormat) -> None:
        """Dequantize row by row to fp32, and round to the dtype of ``out``."""

    def decode_sum(self, rows: Tensor, out: Tensor, fmt: BlockFormat) -> None:
        """Fill each group's row of fp32 ``out`` with the sum of the group's rows, in row order.

        ``out`` is [groups, n], or 1-D if ``rows`` is 2-D. A group has at least one row.
        """


def backend(device: torch.device | str = "cpu") -> str:
    """Return the name of the backend for tensors on ``device``: "torch", "native" or "triton".

    Raises:
        ValueError: ``ZERO_COMM_BACKEND`` names an unknown or unavailable backend.
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
    """Log a warning if the package was built without a compiler."""
    if not _is_available("native"):
        _log.warning(
            "zero_comm was installed without its compiled kernels: plain torch quantizes host "
            "memory, with the same bytes but slower; to have them, install a C++ compiler and then "
            "zero-comm again"
        )


# Preferred backend of each torch device type. ROCm devices have the type "cuda".
_FASTEST: Final = {"cpu": "native", "cuda": "triton", "xpu": "triton"}

# The module that a backend requires, and the error text if the module is missing.
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
