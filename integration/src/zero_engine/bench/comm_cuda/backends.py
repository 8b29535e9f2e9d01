"""Whose kernels are measured: Triton's, compiled on an accelerator or interpreted on the CPU."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings

import torch

from zero_comm.backend import Backend, find_backend
from zero_comm.reference import TorchBackend

__all__ = ["find_accelerator", "interpreted", "on_device"]


def find_accelerator() -> torch.device:
    """The accelerator; LookupError, saying what to do, if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        raise LookupError("torch finds no accelerator; --dry-run is the same program on the CPU")
    return torch.device(found.type, torch.accelerator.current_device_index())


def on_device(device: torch.device) -> Backend:
    """Triton's kernels; LookupError, saying what to do, if another backend serves ``device``."""
    backend = find_backend(device)
    if backend.name != "triton":
        raise LookupError(
            f"the {backend.name} backend serves {device}, and Triton's kernels are what is "
            "measured: install triton, unset ZERO_COMM_BACKEND"
        )
    return backend


def interpreted() -> Backend:
    """The kernels in Triton's interpreter, or the torch backend where there is no triton.

    Sets TRITON_INTERPRET of this process; RuntimeError if triton was imported before.
    """
    if importlib.util.find_spec("triton") is None:
        return TorchBackend()
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported before it could be told to interpret")
    os.environ["TRITON_INTERPRET"] = "1"  # triton reads it as it is imported
    from zero_comm.triton_kernels import BACKEND

    # NumPy, which interprets, warns of overflow that is meant.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
    return BACKEND
