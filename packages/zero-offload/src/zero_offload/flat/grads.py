"""Gradients offered for the next step, by range of the flat space.

The gradient of a range is the sum of its *terms*: gradients of micro-steps, or sums of several.
Terms are added in the order of the micro-steps, in the master weights' dtype (fp32 by default).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_offload.flat.geometry import SpanMap

_Source = tuple[Tensor, int]
"""A tensor, and the element of the flat space at its index 0."""
_Terms = tuple[_Source, ...]


class GradLedger:
    """Record of gradients by range. It holds references to their memory, no copies."""

    def __init__(self) -> None:
        self._terms: SpanMap[_Terms] = SpanMap()

    def add(self, start: int, stop: int, source: Tensor, base: int) -> None:
        """Record ``source[start - base : stop - base]`` as the only term of the range."""
        self._terms.put(start, stop, ((source, base),))

    def append(self, start: int, stop: int, source: Tensor, base: int) -> None:
        """Record ``source[start - base : stop - base]`` as one more term of the range."""
        for a, b, terms in self.terms(start, stop):
            self._terms.put(a, b, (*terms, (source, base)))

    def discard(self, start: int, stop: int) -> None:
        self._terms.discard(start, stop)

    def terms(self, start: int, stop: int) -> list[tuple[int, int, _Terms]]:
        """Return ``(a, b, terms)`` parts that cover a range in order, with empty terms for gaps."""
        return [(a, b, terms or ()) for a, b, terms in self._terms.divide(start, stop)]

    def take(self, spans: Sequence[tuple[int, int]]) -> GradLedger:
        """Move the gradients of ``spans`` to a new ledger. Raise ValueError if some are missing."""
        taken = self.copy(spans)
        for span in spans:
            self._terms.discard(*span)
        return taken

    def copy(self, spans: Sequence[tuple[int, int]]) -> GradLedger:
        found = GradLedger()
        for span in spans:
            for a, b, terms in self._covering(*span):
                found._terms.put(a, b, terms)
        return found

    def segments(self, start: int, stop: int) -> list[tuple[int, int, list[Tensor]]]:
        """Return ``(a, b, terms)`` parts that cover a range. Raise ValueError for a gap."""
        parts = self._covering(start, stop)
        return [
            (a, b, [source[a - base : b - base] for source, base in terms]) for a, b, terms in parts
        ]

    def _covering(self, start: int, stop: int) -> list[tuple[int, int, _Terms]]:
        """Return `terms`, with adjacent parts of equal sources joined, or raise ValueError."""
        found: list[tuple[int, int, _Terms]] = []
        for a, b, terms in self.terms(start, stop):
            if not terms:
                raise ValueError(
                    f"no gradient was offered for [{a}, {stop}), which a piece listed in `active` "
                    f"needs; call offer_grad before step"
                )
            last = found[-1][2] if found else ()
            # Tensors are compared by id, because == compares their elements.
            if [(id(t), base) for t, base in last] == [(id(t), base) for t, base in terms]:
                a = found.pop()[0]
            found.append((a, b, terms))
        return found

    def gather(self, start: int, stop: int, dtype: torch.dtype, grad_scale: float) -> Tensor:
        """Return a range's scaled gradient in ``dtype``, as a view if nothing has to change."""
        parts = self.segments(start, stop)
        first = parts[0][2]
        is_alone = len(parts) == len(first) == 1
        if is_alone and first[0].dtype == dtype and grad_scale == 1.0:
            return first[0]
        grad = torch.empty(stop - start, dtype=dtype, device=first[0].device)
        for a, b, terms in parts:
            add_up(terms, grad[a - start : b - start])
        return grad if grad_scale == 1.0 else grad.mul_(grad_scale)

    def joined(self, start: int, stop: int) -> list[Tensor]:
        """Return a range's terms if each covers all of it, otherwise their sum as one tensor."""
        parts = self.segments(start, stop)
        if len(parts) == 1:
            return parts[0][2]
        dtypes = {term.dtype for _, _, terms in parts for term in terms}
        is_plain = len(dtypes) == 1 and all(len(terms) == 1 for _, _, terms in parts)
        dtype = dtypes.pop() if is_plain else torch.float32
        return [self.gather(start, stop, dtype, 1.0)]


def add_up(terms: Sequence[Tensor], out: Tensor) -> None:
    """Sum ``terms`` in order, in the dtype of ``out``, into ``out``, which may be ``terms[0]``."""
    first, *others = terms
    if first.data_ptr() != out.data_ptr():
        out.copy_(first)
    for other in others:
        out.add_(other)
