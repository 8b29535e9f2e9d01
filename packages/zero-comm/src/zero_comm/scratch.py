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
        allocate: makes a flat tensor of ``(numel, dtype, device)``; `torch.empty` unless given.
    """

    def __init__(
        self, allocate: Callable[[int, torch.dtype, torch.device], Tensor] | None = None
    ) -> None:
        self._allocate = allocate or _empty
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    def take(self, purpose: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor of ``numel`` elements, contents undefined."""
        key = (purpose, dtype, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            self._buffers.pop(key, None)
            buffer = self._buffers[key] = self._allocate(numel, dtype, device)
        return buffer[:numel]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


def _empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=device)
