"""``deepspeed.ops.adagrad``: torch's Adagrad with DeepSpeed's signature."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from zero_engine.deepspeed.ops.options import check_fp32_states, refuse_amsgrad

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad (Duchi et al., 2011), updated by the host kernel with ``offload_optimizer``.

    The sum of squares is in the state as torch calls it, ``sum``.

    Args:
        model_params: parameters, named parameters or groups of them.
        lr: learning rate.
        eps: added to the denominator.
        weight_decay: L2.
        amsgrad: refused; DeepSpeed takes it and does nothing.
        fp32_optimizer_states: only True is served.

    Raises:
        RuntimeError: ``amsgrad``.
        ValueError: ``fp32_optimizer_states`` is False, or a setting is out of range.
    """

    is_elementwise: ClassVar[bool] = True
    has_host_kernel: ClassVar[bool] = True
    update_rule: ClassVar[str] = "adagrad"

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        check_fp32_states("DeepSpeedCPUAdagrad", fp32_optimizer_states)
        refuse_amsgrad("DeepSpeedCPUAdagrad", amsgrad)
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
        self.fp32_optimizer_states = fp32_optimizer_states
