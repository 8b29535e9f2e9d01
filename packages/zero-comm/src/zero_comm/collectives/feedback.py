"""Error feedback: a gradient's quantization error is added to the next gradient.

After LoCo (Xie et al., arXiv 2407.04480), section 3. A rank adds the error that it keeps to its
gradient before quantizing it, and keeps a moving average of the quantization error in 8 bits. The
error is dropped every ``reset_T`` reductions, since it belongs to older weights, and when a step is
skipped, since its gradients had overflowed. (When an fp16 loss scale grows, which is rare, the kept
error counts half once.)
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
    """``zeropp_loco_param`` of DeepSpeed's configuration.

    Args:
        err_beta: weight of the kept error in the moving average, in [0, 1].
        reset_T: reductions after which the error is dropped, at least 1.
    """

    err_beta: float = 0.8
    reset_T: int = 1024

    def __post_init__(self) -> None:
        """Check the values, or raise ValueError."""
        beta: object = self.err_beta
        if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0.0 <= beta <= 1.0:
            raise ValueError(f"err_beta must be a number within [0, 1], got {beta!r}")
        if type(self.reset_T) is not int or self.reset_T < 1:
            raise ValueError(f"reset_T must be a positive integer, got {self.reset_T!r}")


class ErrorFeedback:
    """Errors of gradients that are quantized repeatedly, one for each key.

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
            values.add_(dequantize(error, values.numel(), STORED))

    def update(self, key: object, values: Tensor, arrived: Tensor) -> None:
        """Update the kept error by two flat fp32 tensors, before quantization and after it.

        ``values`` are overwritten. Where ``arrived`` is not finite, the error counts as zero: such
        a step is skipped.
        """
        beta = self._settings.err_beta
        fresh = values.sub_(arrived).mul_(1.0 - beta)
        fresh = torch.where(fresh.isfinite(), fresh, 0.0)
        error = self._errors.get(key)
        if error is not None:
            fresh.add_(dequantize(error, values.numel(), STORED), alpha=beta)
        self._errors[key] = quantize(fresh, STORED, out=error)

    def forget(self) -> None:
        """Drop every error."""
        self._errors.clear()
        self._num_uses.clear()

    @property
    def tensors(self) -> list[Tensor]:
        """Kept errors."""
        return [*self._errors.values()]
