"""Gradients offered for the next step, and the memory of each.

On the host all gradients of one dtype share one flat buffer, so that adjacent offers are one span
of memory. On the device each offer is a tensor of the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_offload.flat.intervals import SpanMap

_Source = tuple[Tensor, int]
"""A tensor and the element of the flat space at its first element."""


class GradLedger:
    """Gradients by range. A later offer replaces an earlier one where they overlap."""

    def __init__(self) -> None:
        self._sources: SpanMap[_Source] = SpanMap()

    def add(self, start: int, stop: int, source: Tensor, base: int) -> None:
        """Record that ``source[start - base : stop - base]`` is the gradient of the range."""
        self._sources.put(start, stop, (source, base))

    def take(self, spans: Sequence[tuple[int, int]]) -> GradLedger:
        """Move the gradients of the spans to a new ledger and return it.

        Raises:
            ValueError: a part of a span was not offered; nothing has moved then.
        """
        found = [part for span in spans for part in self._covering(*span)]
        taken = GradLedger()
        for a, b, (source, base) in found:
            taken.add(a, b, source, base)
        for span in spans:
            self._sources.discard(*span)
        return taken

    def segments(self, start: int, stop: int) -> list[tuple[int, int, Tensor]]:
        """Return ``(a, b, gradient)`` parts that cover ``[start, stop)`` without a gap.

        Raises:
            ValueError: some of the range was not offered.
        """
        parts = self._covering(start, stop)
        return [(a, b, source[a - base : b - base]) for a, b, (source, base) in parts]

    def _covering(self, start: int, stop: int) -> list[tuple[int, int, _Source]]:
        """The sources of a range in order. Adjacent ones of the same memory are one."""
        found: list[tuple[int, int, _Source]] = []
        end = start
        for a, b, source in self._sources.overlaps(start, stop):
            if a > end:
                break
            if found and found[-1][2][0] is source[0] and found[-1][2][1] == source[1]:
                a = found.pop()[0]
            found.append((a, b, source))
            end = b
        if end < stop:
            raise ValueError(
                f"no gradient was offered for [{end}, {stop}), which a piece listed in `active` "
                f"needs; call offer_grad before step"
            )
        return found

    def gather(self, start: int, stop: int, dtype: torch.dtype, grad_scale: float) -> Tensor:
        """Return the gradient of the range as one tensor of ``dtype``, times ``grad_scale``.

        It is the offered memory itself where nothing has to be changed.
        """
        parts = self.segments(start, stop)
        if len(parts) == 1 and parts[0][2].dtype == dtype and grad_scale == 1.0:
            return parts[0][2]
        device = parts[0][2].device
        grad = torch.empty(stop - start, dtype=dtype, device=device)
        for a, b, part in parts:
            grad[a - start : b - start].copy_(part)
        return grad if grad_scale == 1.0 else grad.mul_(grad_scale)

    def joined(self, start: int, stop: int) -> Tensor:
        """Return the gradient of a range as one tensor, in fp32 if its parts differ in dtype."""
        dtypes = {part.dtype for _, _, part in self.segments(start, stop)}
        return self.gather(start, stop, dtypes.pop() if len(dtypes) == 1 else torch.float32, 1.0)
