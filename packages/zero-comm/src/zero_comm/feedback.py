"""Error feedback: what quantizing took from a gradient is given to the next one.

After LoCo (Xie et al., arXiv 2407.04480), section 3: a rank adds the error that it keeps to its
gradient before it is quantized, and keeps a moving average of what quantizing changed, in 8 bits.
Every ``reset_T`` reductions the error is dropped, since it was taken of older weights; and when a
step is skipped, since its gradients had overflowed. (When an fp16 loss scale grows, which is rare,
what is kept counts half once.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zero_comm.block_format import BlockFormat
from zero_comm.quantizer import dequantize, quantize

__all__ = ["ErrorFeedback", "LocoSettings"]

_STORED = BlockFormat.make("int8")


@dataclass(frozen=True, slots=True)
class LocoSettings:
    """``zeropp_loco_param`` of DeepSpeed's configuration.

    Args:
        err_beta: how much of the kept error stays, in [0, 1]; the rest is the new error's.
        reset_T: reductions after which the error is dropped, at least 1.
    """

    err_beta: float = 0.8
    reset_T: int = 1024

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: one is out of range, by name.
        """
        beta: object = self.err_beta
        if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0.0 <= beta <= 1.0:
            raise ValueError(f"err_beta must be a number within [0, 1], got {beta!r}")
        if type(self.reset_T) is not int or self.reset_T < 1:
            raise ValueError(f"reset_T must be a positive integer, got {self.reset_T!r}")


class ErrorFeedback:
    """Errors of gradients that are quantized again and again, one for each key.

    A key's values always have the same number of elements and the same device.
    """

    def __init__(self, settings: LocoSettings) -> None:
        self._settings = settings
        self._errors: dict[object, Tensor] = {}
        self._num_uses: dict[object, int] = {}

    def compensate(self, key: object, values: Tensor) -> None:
        """Add the kept error to ``values`` (fp32, flat), in place."""
        uses = self._num_uses[key] = self._num_uses.get(key, 0) + 1
        if uses > self._settings.reset_T:
            self._num_uses[key] = 1
            self._errors.pop(key, None)
        error = self._errors.get(key)
        if error is not None:
            values.add_(dequantize(error, values.numel(), _STORED))

    def learn(self, key: object, values: Tensor, arrived: Tensor) -> None:
        """Keep the error: ``values`` as they were to be sent, ``arrived`` as the others see them.

        Both fp32 and flat; ``values`` is overwritten. Where a gradient is not finite there is no
        error to speak of: its step is skipped.
        """
        beta = self._settings.err_beta
        fresh = values.sub_(arrived).mul_(1.0 - beta)
        fresh = torch.where(fresh.isfinite(), fresh, 0.0)
        error = self._errors.get(key)
        if error is not None:
            fresh.add_(dequantize(error, values.numel(), _STORED), alpha=beta)
        self._errors[key] = quantize(fresh, _STORED, out=error)

    def forget(self) -> None:
        """Drop every error: of other weights."""
        self._errors.clear()
        self._num_uses.clear()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(error.nbytes for error in tuple(self._errors.values()))
