"""Accelerate's side of the Trainer: its Accelerator and its optimizer, over the engine.

The Trainer asks its Accelerator for the backward, for the gradient's norm and not to synchronize
within an accumulation, and its optimizer for the step. These ask the engine. Everything else, data
loaders above all, is Accelerate's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from torch import Tensor, nn

from zero_core import Engine, ShardedModel


class ZeroOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """The engine's optimizer, with real ``param_groups``, as the Trainer steps it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer, device_placement=False)
        self.engine = engine
        # Accelerate leaves alone what it finds prepared.
        self._is_accelerate_prepared = True

    def step(self, closure: Any = None) -> None:
        """End the step. Within an accumulation, do nothing.

        Raises:
            ValueError: there is a closure: the gradient is computed once per step.
        """
        if closure is not None:
            raise ValueError("ZeroOptimizer.step() takes no closure")
        if self.gradient_state.sync_gradients:
            self.engine.step()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped, as the gradient was not finite."""
        return self.engine.optimizer.overflow


class ZeroAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator of one model that an engine trains. The Trainer's own becomes one."""

    engine: ShardedModel | None = None

    def adopt(self, engine: ShardedModel) -> None:
        """Drive ``engine`` from now on. Its module counts as prepared."""
        self.engine = engine
        engine.module._is_accelerate_prepared = True  # type: ignore[assignment]
        self._models.append(engine.module)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Backward of ``loss``, which is divided over the micro-steps already."""
        engine = self._engine()
        engine.set_gradient_accumulation_boundary(self.sync_gradients)
        engine.backward(loss, over=1, **kwargs)
        if not self.sync_gradients:
            engine.step()

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2
    ) -> float | None:
        """Clip by another norm than the configuration's, which the engine does within the step.

        None where the engine does it: the norm is known after the step, and costs nothing then.
        """
        engine = self._engine()
        if norm_type == 2 and max_norm in (math.inf, engine.config.gradient_clipping):
            return None
        return engine.clip_grad_norm_(max_norm, norm_type)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Leave backwards unreduced in this context where gradients are whole (stages 0 and 1)."""
        engine = self._engine()
        if engine.config.zero_optimization.stage >= 2:
            yield
            return
        with engine.no_sync():
            yield

    def _engine(self) -> Engine:
        if self.engine is None:
            raise RuntimeError("there is no engine yet: call ZeroTrainer.train() or evaluate()")
        if not isinstance(self.engine, Engine):
            raise RuntimeError("the engine only evaluates: call ZeroTrainer.train() to train")
        return self.engine
