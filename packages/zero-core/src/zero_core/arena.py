"""Two kinds of memory that never interleave, so that there is nothing to fragment.

Long-lived memory (parameter shards, gradient shards, master weights, states) is laid out once, one
contiguous buffer per kind (`Arena`). Short-lived memory (gathered units, gradients on their way to
a reduction) comes from buffers that are all as large as the largest request and are handed round
(`BufferPool`). This is the contiguous memory of ZeRO (arXiv 1910.02054, section 6.3) by
construction.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Arena", "BufferPool", "release_free_pages"]


class Arena:
    """Long-lived memory on one device, allocated once per kind, accounted for by name."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes: dict[str, int] = {}

    def allocate(self, kind: str, dtype: torch.dtype, sizes: Sequence[int]) -> list[Tensor]:
        """Views of one buffer, 1-D, of the given numbers of elements, in order, not initialised."""
        buffer = torch.empty(sum(sizes), dtype=dtype, device=self._device)
        self._bytes[kind] = self._bytes.get(kind, 0) + buffer.numel() * buffer.element_size()
        return list(torch.split(buffer, list(sizes)))

    def report(self) -> dict[str, int]:
        """Bytes by kind."""
        return dict(self._bytes)


class BufferPool:
    """Equally large buffers that are handed out as any dtype and come back.

    Reuse is ordered without events: whoever fills a buffer does so from the stream that its last
    reader ran on (a collective first waits for the stream that launches it).
    """

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        """Buffers have ``buffer_bytes`` bytes each and are allocated when first needed."""
        self._device = device
        self._buffer_bytes = buffer_bytes
        self._all: dict[int, Tensor] = {}  # by address
        self._free: list[Tensor] = []

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D view of ``numel`` elements of a free buffer; contents undefined."""
        nbytes = numel * dtype.itemsize
        assert nbytes <= self._buffer_bytes, "the pool was made for smaller requests"
        if self._free:
            buffer = self._free.pop()
        else:
            with torch.inference_mode(False):  # it serves training too
                buffer = torch.empty(self._buffer_bytes, dtype=torch.uint8, device=self._device)
            self._all[buffer.data_ptr()] = buffer
        with torch.inference_mode(False):
            return buffer[:nbytes].view(dtype)

    def release(self, view: Tensor) -> None:
        """Give back what `acquire` gave."""
        self._free.append(self._all[view.data_ptr()])

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one buffer."""
        return self._buffer_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the pool holds, free or not."""
        return len(self._all) * self._buffer_bytes


def release_free_pages() -> None:
    """Give host memory that was freed back to the system, where the C library keeps it.

    Between small objects that stay, glibc keeps pages of large ones that went (below 32 MiB each):
    a third of a model's own memory, once its parameters have moved into an arena.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
