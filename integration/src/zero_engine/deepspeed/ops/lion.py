"""``deepspeed.ops.lion``: zero-core's Lion with DeepSpeed's signatures and defaults."""

from __future__ import annotations

from typing import Any, ClassVar

from zero_core.optim.lion import Lion
from zero_engine.deepspeed.ops.options import check_fp32_states

__all__ = ["DeepSpeedCPULion", "FusedLion"]


class DeepSpeedCPULion(Lion):
    """`zero_core.Lion`, updated by the host kernel with ``offload_optimizer``.

    Args:
        model_params: parameters, named parameters or groups of them.
        lr: learning rate; DeepSpeed's default, ten times the one of `zero_core.Lion`.
        betas: weight of the momentum in the direction, and decay of the momentum; DeepSpeed's
            default, whose second is not the paper's 0.99.
        weight_decay: decoupled.
        fp32_optimizer_states: only True is served.

    Raises:
        ValueError: ``fp32_optimizer_states`` is False, or a setting is out of range.
    """

    has_host_kernel: ClassVar[bool] = True

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        check_fp32_states("DeepSpeedCPULion", fp32_optimizer_states)
        super().__init__(model_params, lr, betas, weight_decay)
        self.fp32_optimizer_states = fp32_optimizer_states


class FusedLion(Lion):
    """`zero_core.Lion` on any device.

    Args:
        params: parameters, named parameters or groups of them.
        lr: learning rate.
        betas: as in `DeepSpeedCPULion`.
        weight_decay: decoupled.
        set_grad_none: what `zero_grad` does without an argument.

    Raises:
        ValueError: a setting is out of range.
    """

    has_host_kernel: ClassVar[bool] = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients as torch does, by default as ``set_grad_none`` says."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
