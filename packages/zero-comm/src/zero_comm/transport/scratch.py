"""Reusable buffers for the jobs of one queue."""

from __future__ import annotations

import torch
from torch import Tensor

from zero_comm.transport.protocol import TransportCollectives


class Scratch:
    """One buffer per purpose, dtype and device, which grows to the largest requested size.

    A tensor from `take` is valid until the next `take` of the same purpose, dtype and device. With
    a ``transport``, its `zeros` allocates the buffers, and `nbytes` counts outgrown ones.
    """

    def __init__(self, transport: TransportCollectives | None = None) -> None:
        self._transport = transport
        self._outgrown_nbytes = 0
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, purpose: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a flat tensor of ``numel`` elements with undefined contents."""
        key = (purpose, dtype, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < numel:
            if self._transport is not None:
                self._outgrown_nbytes += 0 if buffer is None else buffer.nbytes
                buffer = self._transport.zeros(numel, dtype, device)
            else:
                with torch.inference_mode(False):  # training cannot write to inference tensors
                    buffer = torch.empty(numel, dtype=dtype, device=device)
            self._buffers[key] = buffer
        return buffer[:numel]

    @property
    def tensors(self) -> list[Tensor]:
        """All current buffers. Between jobs their contents are undefined."""
        return list(self._buffers.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, and of outgrown ones that the transport may still hold."""
        return self._outgrown_nbytes + sum(b.nbytes for b in tuple(self._buffers.values()))
