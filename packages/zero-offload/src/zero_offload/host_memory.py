"""Host buffers, page-locked as far as a budget goes.

Page-locked ("pinned") memory is what an accelerator copies to and from at full speed, beside
compute. It is taken from everybody: a machine that locks too much of it runs out. So there is one
budget for all of a tier's buffers, and what exceeds it, or cannot be locked, is pageable.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["NUM_PACKED", "HostMemory", "pack"]

NUM_PACKED = 8
"""How many of the largest tensors one buffer has room for; so much less than a tenth is wasted."""

_SMALL_BYTES = 1 << 20
"""What may be rounded up to the next power of two."""


class HostMemory:
    """Makes host tensors.

    Args:
        should_pin: page-lock them; of no use where the compute device is the CPU.
        limit_bytes: most bytes to lock; None for no limit.
        place: a context in which memory is made where it belongs, such as a NUMA node.

    Attributes:
        pinned_bytes: locked so far.
        pageable_bytes: not locked.
    """

    def __init__(
        self,
        *,
        should_pin: bool,
        limit_bytes: int | None = None,
        place: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.pinned_bytes = 0
        self.pageable_bytes = 0
        self._should_pin = should_pin
        self._limit_bytes = limit_bytes
        self._place = place
        self._has_warned = False

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor on the CPU, not initialised.

        Warns once, when memory that should be locked is not.
        """
        nbytes = numel * dtype.itemsize
        if self._should_pin and self._fits(nbytes):
            try:
                with self._place():
                    pinned = torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self._should_pin = False  # it would fail again
                self._warn(
                    f"could not pin {nbytes} bytes of host memory ({error}): the machine, or its "
                    f"container, has no more to lock; set pin_memory_bytes or pin_memory"
                )
            else:
                self.pinned_bytes += nbytes
                return pinned
        self.pageable_bytes += nbytes
        return torch.empty(numel, dtype=dtype, device="cpu")

    def parts(self, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Tensors that hold ``numel`` elements together, in order.

        torch page-locks memory in powers of two, so that one tensor could take twice its bytes:
        these are powers of two, but for a small last one.
        """
        found: list[Tensor] = []
        while numel:
            largest = 1 << (numel.bit_length() - 1)
            is_last = not self._should_pin or numel * dtype.itemsize <= _SMALL_BYTES
            found.append(self.empty(numel if is_last else largest, dtype))
            numel -= found[-1].numel()
        return found

    def tensors(self, sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """1-D tensors of so many elements each, in as few buffers as is sensible; see `parts`."""
        whole = 1 << (NUM_PACKED * max(sizes, default=1) - 1).bit_length()
        found: list[Tensor] = []
        for first, last in pack(sizes, whole if self._should_pin else sum(sizes)):
            buffer = self.empty(sum(sizes[first:last]), dtype)
            found += torch.split(buffer, list(sizes[first:last]))
        return found

    def _fits(self, nbytes: int) -> bool:
        limit = self._limit_bytes
        if limit is None or self.pinned_bytes + nbytes <= limit:
            return True
        self._warn(
            f"{nbytes} bytes more than the {self.pinned_bytes} pinned so far exceed "
            f"pin_memory_bytes = {limit}: raise it if the machine has the memory"
        )
        return False

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{why}. Transfers go through pageable memory and are slower",
                RuntimeWarning,
                stacklevel=2,
            )


def pack(sizes: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Ranges of neighbours whose sizes add up to at most ``limit``, which none exceeds."""
    ranges, first, total = [], 0, 0
    for index, size in enumerate(sizes):
        if total and total + size > limit:
            ranges.append((first, index))
            first, total = index, 0
        total += size
    return [*ranges, (first, len(sizes))] if sizes else ranges
