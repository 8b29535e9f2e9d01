"""Host buffers, page-locked up to a limit.

Page-locked ("pinned") memory allows asynchronous copies at full speed, but the machine cannot swap
it. All buffers of a tier share one limit. Memory is pageable beyond it or if locking fails.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from zero_offload.memory.storage import aligned_empty

_NUM_PACKED = 8
"""Minimum capacity of a page-locked packed buffer, in tensors of the largest size."""
SMALL_BYTES = 1 << 20
"""Maximum bytes of a tensor whose size torch may round up to a power of two."""
_ALIGNMENT = 64


class HostMemory:
    """Allocator of host tensors, page-locked up to ``limit_bytes`` (None for no limit)."""

    def __init__(self, *, should_pin: bool, limit_bytes: int | None = None) -> None:
        self.pinned_bytes = 0
        self.pageable_bytes = 0
        self._should_pin = should_pin
        self._limit_bytes = limit_bytes
        self._has_warned = False

    @property
    def num_bytes(self) -> int:
        return self.pinned_bytes + self.pageable_bytes

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized 1-D CPU tensor. Warn at the first failure to page-lock."""
        make = partial(torch.empty, numel, dtype=dtype, device="cpu")
        return self._allocate(numel * dtype.itemsize, make)

    def buffer(self, num_bytes: int) -> Tensor:
        """Return uninitialized uint8 memory that is aligned for direct I/O."""
        return self._allocate(num_bytes, partial(aligned_empty, num_bytes))

    def parts(self, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Return tensors with ``numel`` elements in total, which cover a flat space in order.

        Torch rounds page-locked memory up to a power of two. To waste little, the number of
        elements of each page-locked tensor is a power of two, except for a small last one.
        """
        found: list[Tensor] = []
        while numel:
            largest = 1 << (numel.bit_length() - 1)
            is_last = not self._should_pin or numel * dtype.itemsize <= SMALL_BYTES
            found.append(self.empty(numel if is_last else largest, dtype))
            numel -= found[-1].numel()
        return found

    def tensors(self, shapes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Return uninitialized 1-D tensors of ``(numel, dtype)``, packed into few buffers."""
        sizes = [numel * dtype.itemsize for numel, dtype in shapes]
        found: list[Tensor] = []
        for group in packed(sizes, should_pin=self._should_pin):
            buffer, at = self.empty(sum(group), torch.uint8), 0
            for size in group:
                numel, dtype = shapes[len(found)]
                found.append(buffer[at : at + numel * dtype.itemsize].view(dtype))
                at += size
        return found

    def _allocate(self, num_bytes: int, make: Callable[..., Tensor]) -> Tensor:
        limit = self._limit_bytes
        if self._should_pin and limit is not None and self.pinned_bytes + num_bytes > limit:
            self._warn(
                f"{num_bytes} bytes more than the {self.pinned_bytes} pinned so far exceed "
                f"pin_memory_bytes = {limit}: raise it if the machine has the memory"
            )
        elif self._should_pin:
            try:
                pinned = make(pin_memory=True)
            except RuntimeError as error:
                self._should_pin = False  # do not try again
                self._warn(
                    f"could not pin {num_bytes} bytes of host memory ({error}): the machine, or "
                    f"its container, has no more to lock. Raise the locked-memory limit, set "
                    f"pin_memory_bytes, or set pin_memory to false"
                )
            else:
                self.pinned_bytes += num_bytes
                return pinned
        self.pageable_bytes += num_bytes
        return make(pin_memory=False)

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{why}. Transfers go through pageable memory and are slower",
                RuntimeWarning,
                stacklevel=2,
            )


def packed(sizes: Sequence[int], *, should_pin: bool) -> list[list[int]]:
    """Return the aligned tensor sizes, in bytes, in each buffer of `HostMemory.tensors`."""
    aligned = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    largest = max(aligned, default=0)
    limit = 1 << (_NUM_PACKED * max(largest, 1) - 1).bit_length() if should_pin else sum(aligned)
    buffers: list[list[int]] = []
    for size in aligned:
        if not buffers or (any(buffers[-1]) and sum(buffers[-1]) + size > limit):
            buffers.append([])
        buffers[-1].append(size)
    return buffers
