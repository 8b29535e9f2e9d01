"""Two kinds of memory that never interleave, so that there is nothing to fragment.

Long-lived memory (parameter shards, gradient shards, master weights, states) is laid out once, one
contiguous buffer per kind (`Arena`). Short-lived memory (gathered units, gradients on their way to
a reduction) comes from buffers that are all as large as the largest request and are handed round
(`BufferPool`). This is the contiguous memory of ZeRO (arXiv 1910.02054, section 6.3) by
construction.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["Allocate", "Arena", "BufferPool", "allocator", "release_free_pages"]

Allocate = Callable[[int, torch.dtype], Tensor]
"""Makes a 1-D tensor of so many elements, not initialised."""


def allocator(device: torch.device) -> Allocate:
    """Ordinary memory of ``device``."""
    return lambda numel, dtype: torch.empty(numel, dtype=dtype, device=device)


class Arena:
    """Long-lived memory on one device, allocated once per kind, accounted for by name."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._bytes: dict[str, int] = {}

    def allocate(self, kind: str, dtype: torch.dtype, sizes: Sequence[int]) -> list[Tensor]:
        """Views of one buffer, 1-D, of the given numbers of elements, in order, not initialised."""
        buffer = self._allocate(sum(sizes), dtype)
        self._bytes[kind] = self._bytes.get(kind, 0) + buffer.numel() * buffer.element_size()
        return list(torch.split(buffer, list(sizes)))

    def report(self) -> dict[str, int]:
        """Bytes by kind."""
        return dict(self._bytes)


class BufferPool:
    """Equally large buffers that are handed out as any dtype and come back.

    Whoever fills a buffer does so from the stream that its last reader ran on (a collective first
    waits for the stream that launches it); other readers are waited for by what `release` is given.
    """

    def __init__(self, allocate: Allocate, buffer_bytes: int, *, num_spare: int = 0) -> None:
        """Buffers have ``buffer_bytes`` bytes each and are allocated when first needed.

        So many as ``num_spare`` stay free rather than be handed out: their last readers have
        time, and nobody waits for them.
        """
        self._num_spare = num_spare
        self._allocate = allocate
        self._buffer_bytes = buffer_bytes
        self._all: dict[int, Tensor] = {}  # by address
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}  # by address, elements, dtype
        self._free: deque[tuple[Tensor, Callable[[], None] | None]] = deque()

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D view of ``numel`` elements of a free buffer; contents undefined."""
        nbytes = numel * dtype.itemsize
        assert nbytes <= self._buffer_bytes, "the pool was made for smaller requests"
        if len(self._free) > self._num_spare:
            buffer, wait_until_read = self._free.popleft()  # the one that has rested longest
            if wait_until_read is not None:
                wait_until_read()
        else:
            with torch.inference_mode(False):  # it serves training too
                buffer = self._allocate(self._buffer_bytes, torch.uint8)
            self._all[buffer.data_ptr()] = buffer
        key = (buffer.data_ptr(), numel, dtype)
        view = self._views.get(key)
        if view is None:
            with torch.inference_mode(False):
                self._views[key] = view = buffer[:nbytes].view(dtype)
        return view

    def release(self, view: Tensor, wait_until_read: Callable[[], None] | None = None) -> None:
        """Give back what `acquire` gave; before it is handed out again, ``wait_until_read``."""
        self._free.append((self._all[view.data_ptr()], wait_until_read))

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
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none, and keeps none
        if trim is not None:
            trim(0)
