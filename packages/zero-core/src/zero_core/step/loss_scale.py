"""Loss scaling and gradient clipping."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zero_core._torch import pytree
from zero_core.config import Fp16Config

_log = logging.getLogger(__name__)


class LossScaler:
    """The loss scale: constant, or dynamic as of Micikevicius et al. (arXiv 1710.03740), 3.2.

    Dynamic: doubled after ``loss_scale_window`` steps without overflow; an overflow first uses up
    ``hysteresis``, then each one halves the scale, down to ``min_loss_scale``.

    Attributes:
        is_dynamic: whether the scale changes.
        scale: factor on the loss; 1 without fp16.
        is_applied: whether a loss of the current micro-step has been scaled.
    """

    def __init__(self, config: Fp16Config) -> None:
        self._config = config
        self.is_dynamic = config.enabled and config.loss_scale == 0.0
        if not config.enabled:
            self.scale = 1.0
        elif self.is_dynamic:
            self.scale = max(2.0**config.initial_scale_power, config.min_loss_scale)
        else:
            self.scale = config.loss_scale
        self.is_applied = False
        self._hysteresis_left = config.hysteresis
        self._steps_since_change = 0

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the scale."""
        self.is_applied = True
        return loss if self.scale == 1.0 else loss * self.scale

    def update(self, *, is_overflow: bool) -> None:
        """Adapt the scale after a step that was taken, or skipped for an overflow."""
        if not self.is_dynamic:
            return
        config = self._config
        if is_overflow:
            self._steps_since_change = 0
            if self._hysteresis_left > 1:
                self._hysteresis_left -= 1
                return
            if self.scale <= config.min_loss_scale:
                _log.warning("overflow at the smallest loss scale %g", self.scale)
            self.scale = max(self.scale / 2.0, config.min_loss_scale)
            return
        if config.consecutive_hysteresis:
            self._hysteresis_left = config.hysteresis
        self._steps_since_change += 1
        if self._steps_since_change >= config.loss_scale_window:
            self._steps_since_change = 0
            self._hysteresis_left = config.hysteresis
            self.scale *= 2.0

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint keeps: nothing, if the scale is constant."""
        if not self.is_dynamic:
            return {}
        return {
            "scale": self.scale,
            "hysteresis_left": self._hysteresis_left,
            "steps_since_change": self._steps_since_change,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`. A constant scale stays what the configuration says."""
        if self.is_dynamic and state:
            self.scale = float(state["scale"])
            self._hysteresis_left = int(state["hysteresis_left"])
            self._steps_since_change = int(state["steps_since_change"])


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that brings a gradient's ``norm`` down to ``max_norm``, 1 if that is 0.

    The formula of `torch.nn.utils.clip_grad_norm_`, with its epsilon of 1e-6.
    """
    if max_norm <= 0.0 or not math.isfinite(norm):
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))


def cast_floats(inputs: Any, dtype: torch.dtype | None) -> Any:
    """Cast floating tensors in nested ``inputs`` to ``dtype``, or none of them if it is None."""
    if dtype is None:
        return inputs
    return pytree.tree_map_only(
        Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs
    )
