"""Base class of this package's torch optimizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import overload

import torch


class BaseOptimizer(torch.optim.Optimizer, ABC):
    """Torch optimizer that evaluates a closure before its update."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        ``closure`` computes the loss, which is returned, and its gradients before the update.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    @abstractmethod
    def _update(self) -> None:
        """Update every parameter that has a gradient, with autograd off."""


def check_settings(betas: tuple[float, ...], **settings: float) -> None:
    """Check hyperparameters."""
    for name, value in settings.items():
        if not value >= 0.0:
            raise ValueError(f"{name} must not be negative, got {value}")
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"betas[{index}] must be in [0, 1), got {beta}")
