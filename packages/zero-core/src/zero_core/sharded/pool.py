"""Two kinds of memory that never interleave, so that there is nothing to fragment.

Long-lived memory (parameter shards, gradient shards, master weights, states) is laid out once, one
contiguous buffer per kind (`Arena`). Short-lived memory (gathered units, gradients before their
reduction) is borrowed from buffers that are all as large as the largest request (`BufferPool`).
This is the contiguous memory of ZeRO (arXiv 1910.02054, section 6.3) by construction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from zero_core.protocols import Work

Allocate = Callable[[int, torch.dtype], Tensor]
"""Allocates a 1-D tensor of a number of elements, uninitialised."""


def allocator(device: torch.device) -> Allocate:
    """Return what allocates ordinary memory of ``device``."""
    return lambda numel, dtype: torch.empty(numel, dtype=dtype, device=device)


class CopyQueue(Protocol):
    """Stream of copies that fill buffers: see `zero_core.sharded.param_offload`."""

    def after_readers(self) -> Work | None:
        """Return what makes the queue wait for what the current stream holds by now."""
        ...


class Arena:
    """Long-lived memory on one device, allocated once per kind, accounted for by name."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._bytes: dict[str, int] = {}

    def allocate(self, kind: str, dtype: torch.dtype, sizes: Sequence[int]) -> list[Tensor]:
        """Allocate one buffer. Return 1-D views of ``sizes`` elements, in order, uninitialised."""
        buffer = self._allocate(sum(sizes), dtype)
        self._bytes[kind] = self._bytes.get(kind, 0) + buffer.numel() * buffer.element_size()
        return list(torch.split(buffer, list(sizes)))

    def report(self) -> dict[str, int]:
        """Bytes by kind."""
        return dict(self._bytes)


class BufferPool:
    """Equally large buffers, borrowed as any dtype and returned.

    A borrower fills a buffer from the stream that its last reader ran on (a collective first waits
    for the stream that launches it). `release` is given what other readers are to be waited for.
    """

    def __init__(
        self,
        allocate: Allocate,
        buffer_bytes: int,
        *,
        num_spare: int = 0,
        queue: CopyQueue | None = None,
    ) -> None:
        """Make a pool. Buffers are allocated when first needed.

        Args:
            allocate: makes a buffer.
            buffer_bytes: bytes of each buffer.
            num_spare: free buffers kept in reserve, so that a pending copy can finish before its
                buffer is reused.
            queue: fills buffers, too, and waits for the stream that released them.
        """
        self._queue = queue
        self._num_spare = num_spare
        self._allocate = allocate
        self._buffer_bytes = buffer_bytes
        self._all: dict[int, Tensor] = {}  # by address
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}  # by address, elements, dtype
        self._free: deque[tuple[int, Work | None]] = deque()  # by address

    def acquire(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Borrow a 1-D view of ``numel`` elements of a free buffer. Contents undefined."""
        if len(self._free) > self._num_spare:
            address, readers = self._free.popleft()  # the one that has been free longest
            if readers is not None:
                readers.wait()
        else:
            with torch.inference_mode(False):  # it serves training too
                buffer = self._allocate(self._buffer_bytes, torch.uint8)
            address = buffer.data_ptr()
            self._all[address] = buffer
        view = self._views.get((address, numel, dtype))
        if view is None:
            nbytes = numel * dtype.itemsize
            assert nbytes <= self._buffer_bytes, "the pool was made for smaller requests"
            with torch.inference_mode(False):
                view = self._all[address][:nbytes].view(dtype)
            self._views[address, numel, dtype] = view
        return view

    def release(self, view: Tensor, readers: Work | None = None) -> None:
        """Return what was borrowed. Before it is lent again, ``readers`` are waited for."""
        address = view.data_ptr()
        assert address in self._all, "it was borrowed from another pool"
        if self._queue is not None:
            readers = self._queue.after_readers()
        self._free.append((address, readers))

    @property
    def buffer_bytes(self) -> int:
        return self._buffer_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the pool holds, free or not."""
        return len(self._all) * self._buffer_bytes
