"""Gradients of parameters that several segments use, until the last segment has added its part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from zero_core.runtime.host_inputs import HostCopies, HostCopy


class HostGradients:
    """Host memory for the partial gradients of a step's micro-batches.

    The device has those of two turns at a time: the stream that computes waits until those of the
    turn before are on the host, and their memory is free then.
    """

    def __init__(self, copies: HostCopies, num_micro_batches: int) -> None:
        """``copies`` copies them. Their sizes are asked for ``num_micro_batches`` times."""
        self.copies = copies
        self._num_micro_batches = num_micro_batches
        self._leaving: list[tuple[Tensor, HostCopy]] = []

    def store(self, grads: Iterable[Tensor]) -> list[HostCopy | Tensor]:
        """Begin to copy a turn's gradients down. Those that cannot be moved are returned."""
        self.settle()
        found: list[HostCopy | Tensor] = []
        for grad in grads:
            stored = self.copies.store(grad, self._num_micro_batches)
            if stored is not None:
                self._leaving.append((grad, stored))
            found.append(grad if stored is None else stored)
        return found

    def settle(self) -> None:
        """Drop what is being copied down, once the current stream has waited for that."""
        for _, stored in self._leaving:
            self.copies.wait(stored)
        self._leaving.clear()


class PartialGrads:
    """Partial gradients of one micro-batch, by id of the parameter, on the host between turns."""

    def __init__(self, host: HostGradients | None) -> None:
        """Keep partial gradients in ``host``, or on their device if it is None."""
        self._host = host
        self._grads: dict[int, Tensor] = {}
        self._stored: dict[int, HostCopy] = {}

    def put(self, param: int, grad: Tensor) -> None:
        self._grads[param] = grad

    def discard(self, param: int) -> None:
        self._grads.pop(param, None)

    def get(self, param: int) -> Tensor | None:
        """Return the sum so far, None without one. It stays on its own device to the turn's end."""
        if self._host is not None and param in self._stored:
            self._grads[param] = self._host.copies.take(self._stored.pop(param))
        return self._grads.get(param)

    def take_all(self) -> Iterator[tuple[int, Tensor]]:
        """Yield all with their parameters, and drop them."""
        for param in [*self._grads, *self._stored]:
            grad = self.get(param)
            assert grad is not None
            self.discard(param)
            yield param, grad

    def prefetch(self, params: Iterable[int]) -> None:
        """Begin to copy back what waits on the host of the gradients of ``params``."""
        if self._host is not None:
            for param in params:
                if param in self._stored:
                    self._host.copies.fetch(self._stored[param])

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Move what is left at the end of a turn to the host."""
        yield
        if self._host is not None:
            params, grads = list(self._grads), list(self._grads.values())
            self._grads.clear()
            for param, stored in zip(params, self._host.store(grads), strict=True):
                if isinstance(stored, HostCopy):
                    self._stored[param] = stored
                else:
                    self._grads[param] = stored
