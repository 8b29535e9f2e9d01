"""Buffers that a lane's jobs use one after another, each for one purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Scratch"]


class Scratch:
    """One buffer per purpose, dtype and device, as large as the largest that was asked for.

    For work that runs strictly in turn, as the jobs of one lane do: what `take` gives is void as
    soon as the same purpose is asked for again.

    Args:
        allocate: makes a flat tensor of ``(numel, dtype, device)``, and is taken to keep it for
            good; `torch.empty` unless given.
    """

    def __init__(
        self, allocate: Callable[[int, torch.dtype, torch.device], Tensor] | None = None
    ) -> None:
        self._allocate = allocate or _empty
        self._is_given_back = allocate is None
        self._outgrown_nbytes = 0
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    def take(self, purpose: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor of ``numel`` elements, contents undefined."""
        key = (purpose, dtype, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            outgrown = self._buffers.pop(key, None)
            if outgrown is not None and not self._is_given_back:
                self._outgrown_nbytes += outgrown.nbytes
            buffer = self._buffers[key] = self._allocate(numel, dtype, device)
        return buffer[:numel]

    @property
    def nbytes(self) -> int:
        """Bytes held; those of ``allocate`` stay taken when a larger buffer follows."""
        return self._outgrown_nbytes + sum(b.nbytes for b in tuple(self._buffers.values()))


def _empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # what evaluation asks for first serves training too
        return torch.empty(numel, dtype=dtype, device=device)
