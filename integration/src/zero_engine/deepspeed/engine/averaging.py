"""Gradients of a plain ``loss.backward()`` are averaged over a step's micro-steps, as DeepSpeed's.

[Note: divided once]
`DeepSpeedEngine.backward` divides the loss. Any other backward that reaches a parameter has its
gradient divided there, by a hook on the parameter, before it is accumulated: however many losses
and outputs there are, and wherever a block is computed again, each gradient passes there once.
DeepSpeed divides at the outputs of forward. A loss that goes through several engines is divided by
the one whose ``backward`` is called, and by no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class Averaging:
    """Division of the gradients of plain backwards. See [Note: divided once].

    Attributes:
        handles: of its hooks, for whoever takes them off.
    """

    _running = 0  # backwards of engines, which divide their loss; in all threads, as autograd's

    def __init__(self, params: Iterable[nn.Parameter], steps: Callable[[], int]) -> None:
        """Hook ``params``, some of which may be frozen for now. ``steps`` is called each time."""
        self._steps = steps
        self.handles = [self._hook(param) for param in params]

    @classmethod
    @contextmanager
    def done(cls) -> Iterator[None]:
        """Mark a backward whose loss has been divided, or is not to be."""
        Averaging._running += 1
        try:
            yield
        finally:
            Averaging._running -= 1

    def _hook(self, param: nn.Parameter) -> Any:
        is_required = param.requires_grad
        param.requires_grad_(True)  # torch hooks no other; the hook stays when it is switched off
        handle = param.register_hook(self._divide)  # type: ignore[no-untyped-call]
        param.requires_grad_(is_required)
        return handle

    def _divide(self, grad: Tensor) -> Tensor | None:
        steps = self._steps()
        return None if self._running or steps == 1 else grad / steps
