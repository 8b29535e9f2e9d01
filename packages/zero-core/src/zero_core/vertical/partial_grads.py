"""Gradients of parameters of which another segment's backward brings the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from zero_core.runtime.host_inputs import HostInputs


class PartialGrads:
    """Sums so far of one micro-batch, by id of the parameter: a tied weight's has two parts.

    They may wait in host memory between two turns of the micro-batch, where there are as many for
    each of the others.
    """

    def __init__(self, host: HostInputs | None, num_micro_batches: int) -> None:
        """``host`` moves them to the host and back; None leaves them where they are."""
        self._host = host
        self._num_micro_batches = num_micro_batches
        self._grads: dict[int, Tensor] = {}
        self._stored: dict[int, object] = {}  # those that wait on the host

    def put(self, param: int, grad: Tensor) -> None:
        """Keep the sum so far."""
        self._grads[param] = grad

    def discard(self, param: int) -> None:
        """Drop the sum, which is complete."""
        self._grads.pop(param, None)

    def get(self, param: int) -> Tensor | None:
        """Return the sum so far, None without one. It stays here, on its own device."""
        if self._host is not None and param in self._stored:
            self._grads[param] = self._host.load(self._stored.pop(param))
        return self._grads.get(param)

    def take_all(self) -> Iterator[tuple[int, Tensor]]:
        """Yield all with their parameters, and drop them."""
        for param in [*self._grads, *self._stored]:
            grad = self.get(param)
            assert grad is not None
            self.discard(param)
            yield param, grad

    def prefetch(self) -> None:
        """Begin to copy back what waits on the host."""
        if self._host is not None:
            for stored in self._stored.values():
                self._host.prefetch(stored)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Move what is left at the end of a turn to the host."""
        yield
        if self._host is not None:
            for param, grad in self._grads.items():
                self._stored[param] = self._host.store(grad, self._num_micro_batches)
            self._grads.clear()
