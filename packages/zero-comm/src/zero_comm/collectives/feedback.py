"""Error feedback, which adds a gradient's quantization error to the next gradient.

After LoCo (Xie et al., arXiv 2407.04480), section 3. A rank adds its kept error to a gradient
before quantizing it. The kept error is a moving average of quantization errors in 8 bits. It is
dropped every ``reset_T`` reductions, because it belongs to older weights, and after a skipped step,
because the step's gradients overflowed. When an fp16 loss scale doubles, which is rare, the kept
error has half its weight in one reduction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zero_comm.quantizer.block_format import BlockFormat
from zero_comm.quantizer.quantize import dequantize, quantize

STORED = BlockFormat.make("int8")  # format of the kept errors


@dataclass(frozen=True, slots=True)
class LocoSettings:
    """Settings of error feedback, ``zeropp_loco_param`` in DeepSpeed's configuration.

    Args:
        err_beta: weight of the kept error in the moving average, in [0, 1].
        reset_T: number of reductions after which the error is dropped, at least 1.
    """

    err_beta: float = 0.8
    reset_T: int = 1024

    def __post_init__(self) -> None:
        beta: object = self.err_beta
        if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0.0 <= beta <= 1.0:
            raise ValueError(f"err_beta must be a number within [0, 1], got {beta!r}")
        if type(self.reset_T) is not int or self.reset_T < 1:
            raise ValueError(f"reset_T must be a positive integer, got {self.reset_T!r}")


class ErrorFeedback:
    """Errors of repeatedly quantized gradients. A key always has the same length and device."""

    def __init__(self, settings: LocoSettings) -> None:
        self._settings = settings
        self._errors: dict[object, Tensor] = {}
        self._num_uses: dict[object, int] = {}

    def compensate(self, key: object, values: Tensor) -> None:
        """Add the kept error to ``values`` (fp32, flat) in place."""
        uses = self._num_uses[key] = self._num_uses.get(key, 0) + 1
        if uses > self._settings.reset_T:
            self._num_uses[key] = 1
            self._errors.pop(key, None)
        error = self._errors.get(key)
        if error is not None:
            values.add_(dequantize(error, values.numel(), STORED))

    def update(self, key: object, values: Tensor, arrived: Tensor) -> None:
        """Update the kept error from ``values`` and their values after quantization, ``arrived``.

        Both are flat fp32. ``values`` is overwritten. The error counts as zero where ``arrived`` is
        not finite, because such a step is skipped.
        """
        beta = self._settings.err_beta
        fresh = values.sub_(arrived).mul_(1.0 - beta)
        fresh = torch.where(fresh.isfinite(), fresh, 0.0)
        error = self._errors.get(key)
        if error is not None:
            fresh.add_(dequantize(error, values.numel(), STORED), alpha=beta)
        self._errors[key] = quantize(fresh, STORED, out=error)

    def forget(self) -> None:
        self._errors.clear()
        self._num_uses.clear()

    @property
    def tensors(self) -> list[Tensor]:
        return [*self._errors.values()]
