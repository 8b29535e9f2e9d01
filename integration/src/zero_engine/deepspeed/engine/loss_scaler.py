"""Loss scale under DeepSpeed's names, as ``engine.optimizer.loss_scaler``."""

from __future__ import annotations

from torch import Tensor

from zero_core import Engine


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

    @property
    def cur_scale(self) -> float:
        """Factor on the loss, 1 without one."""
        return self._core.loss_scaler.scale

    loss_scale = cur_scale

    @property
    def dynamic(self) -> bool:
        """Whether the scale changes."""
        return self._core.loss_scaler.is_dynamic

    dynamic_loss_scale = dynamic

    @property
    def use_grad_scaling(self) -> bool:
        """Whether the loss is scaled at all."""
        return self._core.config.fp16.enabled

    @property
    def scale_window(self) -> int:
        """Steps without overflow after which the scale is doubled."""
        return self._core.loss_scaler.config.loss_scale_window

    @property
    def min_scale(self) -> float:
        """Smallest dynamic scale."""
        return self._core.loss_scaler.config.min_loss_scale

    min_loss_scale = min_scale

    @property
    def delayed_shift(self) -> int:
        """Overflows of which the last one halves the scale."""
        return self._core.loss_scaler.config.hysteresis

    @property
    def cur_hysteresis(self) -> int:
        """Overflows from now on of which the last one halves the scale."""
        return self._core.loss_scaler.hysteresis_left

    @property
    def consecutive_hysteresis(self) -> bool:
        """Whether a step without overflow restores ``cur_hysteresis``."""
        return self._core.loss_scaler.config.consecutive_hysteresis

    @property
    def cur_iter(self) -> int:
        """Steps so far."""
        return self._core.global_steps

    @property
    def last_overflow_iter(self) -> int:
        """Steps before the last one that overflowed, -1 if none did."""
        return self.cur_iter - self._core.loss_scaler.steps_since_overflow - 1

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the scale, for a plain ``backward()``."""
        return self._core.scale(loss, over=1)
