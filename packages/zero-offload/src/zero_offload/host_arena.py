"""Host memory that an accelerator copies from: page-locked where that can be had."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from zero_offload.direct_io import aligned_empty, round_up
from zero_offload.host_memory import NUM_PACKED, pack

__all__ = ["HostArena"]

_ALIGNMENT = 64


class HostArena:
    """Long-lived host memory.

    Args:
        pin_memory: page-lock it. If that fails there is one warning, and pageable memory.

    Attributes:
        num_bytes: bytes handed out so far.
    """

    def __init__(self, *, pin_memory: bool) -> None:
        self.num_bytes = 0
        self._should_pin = pin_memory

    def buffer(self, num_bytes: int) -> Tensor:
        """Uninitialised memory, uint8, 1-D, that direct I/O reads and writes in place."""
        self.num_bytes += num_bytes
        if self._should_pin:
            try:
                return aligned_empty(num_bytes, pin_memory=True)
            except RuntimeError as error:
                self._should_pin = False
                warnings.warn(
                    f"could not pin {num_bytes} bytes of host memory ({error}); parameters are "
                    f"copied from pageable memory, which is slower. Raise the locked-memory limit "
                    f"or set offload_param.pin_memory to false",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return aligned_empty(num_bytes)

    def tensors(self, shapes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Uninitialised 1-D tensors of ``(numel, dtype)``, in as few buffers as is sensible.

        torch page-locks memory in powers of two: one buffer for all might waste as much as it
        holds. Several, each with room for some of the largest, waste little.
        """
        sizes = [-(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for numel, dtype in shapes]
        limit = _power_of_two(NUM_PACKED * max(sizes, default=0))
        found: list[Tensor] = []
        for first, last in pack(sizes, limit if self._should_pin else sum(sizes)):
            buffer, at = self.buffer(sum(sizes[first:last])), 0
            for (numel, dtype), size in zip(shapes[first:last], sizes[first:last], strict=True):
                found.append(buffer[at : at + numel * dtype.itemsize].view(dtype))
                at += size
        return found


def _power_of_two(num_bytes: int) -> int:
    """Room that page-locking takes ``num_bytes`` for, less what `aligned_empty` adds."""
    return (1 << max(round_up(num_bytes), 1).bit_length()) - round_up(1)
