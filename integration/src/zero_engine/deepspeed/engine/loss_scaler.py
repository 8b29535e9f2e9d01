"""Loss scale under DeepSpeed's names, as ``engine.optimizer.loss_scaler``."""

from __future__ import annotations

from torch import Tensor

from zero_core import Engine
from zero_engine.deepspeed.engine.facts import value_of


class LossScaler:
    """View of an engine's loss scale. The engine changes it, when DeepSpeed would.

    It has the names of DeepSpeed's ``loss_scaler``, at stages 1 to 3, and of its
    ``loss_scale_config``, at stage 0.

    Attributes:
        scale_factor: what the scale is multiplied or divided by.
    """

    scale_factor = 2.0

    def __init__(self, core: Engine) -> None:
        self._core = core

    cur_scale = loss_scale = property(value_of("_core.loss_scaler.scale"))  # 1 without one
    dynamic = dynamic_loss_scale = property(value_of("_core.loss_scaler.is_dynamic"))
    use_grad_scaling = property(value_of("_core.config.fp16.enabled"))
    scale_window = property(value_of("_core.loss_scaler.config.loss_scale_window"))
    min_scale = min_loss_scale = property(value_of("_core.loss_scaler.config.min_loss_scale"))
    # Overflows of which the last one halves the scale: at first, and from now on.
    delayed_shift = property(value_of("_core.loss_scaler.config.hysteresis"))
    cur_hysteresis = property(value_of("_core.loss_scaler.hysteresis_left"))
    # Whether a step without overflow restores it.
    consecutive_hysteresis = property(value_of("_core.loss_scaler.config.consecutive_hysteresis"))
    cur_iter = property(value_of("_core.global_steps"))

    @property
    def last_overflow_iter(self) -> int:
        """Steps before the last one that overflowed, -1 if none did."""
        return self._core.global_steps - self._core.loss_scaler.steps_since_overflow - 1

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the scale, for a plain ``backward()``."""
        return self._core.scale(loss, over=1)
