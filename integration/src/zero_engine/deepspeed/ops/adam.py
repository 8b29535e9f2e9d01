"""``deepspeed.ops.adam``: Adam and AdamW under DeepSpeed's names and with its signatures."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from cpu_adam import CPUAdam
from zero_core.optim.adam import Adam
from zero_engine.deepspeed.ops.options import check_fp32_states, refuse_amsgrad

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class DeepSpeedCPUAdam(CPUAdam):
    """`cpu_adam.CPUAdam` with DeepSpeed's signature.

    Given to ``initialize`` with ``offload_optimizer``, the offloaded tier makes its update with the
    same kernel; stepped by itself, it updates parameters in host memory. Parameters may lie
    anywhere when it is made, since the engine may move their state to the host later.

    Args:
        model_params: parameters, named parameters or groups of them.
        lr: learning rate.
        bias_correction: divide the moments by ``1 - beta ** step``.
        betas: decay of the first and second moment, in [0, 1).
        eps: added to the denominator.
        weight_decay: decoupled (``adamw_mode``) or L2.
        amsgrad: refused, as in DeepSpeed.
        adamw_mode: AdamW.
        fp32_optimizer_states: only True is served.

    Raises:
        RuntimeError: ``amsgrad``.
        ValueError: ``fp32_optimizer_states`` is False, or a setting is out of range.
    """

    has_host_kernel: ClassVar[bool] = True
    update_rule: ClassVar[str] = "adam"

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        check_fp32_states("DeepSpeedCPUAdam", fp32_optimizer_states)
        refuse_amsgrad("DeepSpeedCPUAdam", amsgrad)
        super().__init__(
            model_params,
            lr,
            betas,
            eps,
            weight_decay,
            bias_correction=bias_correction,
            adamw_mode=adamw_mode,
        )
        self.adam_w_mode = adamw_mode
        self.fp32_optimizer_states = fp32_optimizer_states

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as the same dict, which a scheduler over an earlier optimizer may hold.

        Raises:
            RuntimeError: it asks for ``amsgrad``.
        """
        refuse_amsgrad("DeepSpeedCPUAdam", param_group.get("amsgrad", False))
        # Not CPUAdam's, which refuses parameters that are not in host memory yet; its step does.
        torch.optim.Optimizer.add_param_group(self, param_group)
        group = self.param_groups[-1]
        group["decoupled_weight_decay"] = group["adamw_mode"]  # torch's word, which tiers read


class FusedAdam(Adam):
    """`zero_core.optim.adam.Adam` with DeepSpeed's signature: torch's fused kernel on any device.

    Args:
        params: parameters, named parameters or groups of them.
        lr: learning rate.
        bias_correction: divide the moments by ``1 - beta ** step``.
        betas: decay of the first and second moment, in [0, 1).
        eps: added to the denominator.
        adam_w_mode: AdamW; otherwise the weight decay is L2.
        weight_decay: see ``adam_w_mode``.
        amsgrad: refused, as in DeepSpeed.
        set_grad_none: what `zero_grad` does without an argument.

    Raises:
        RuntimeError: ``amsgrad``.
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        refuse_amsgrad("FusedAdam", amsgrad)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            bias_correction=bias_correction,
            decoupled_weight_decay=bool(adam_w_mode),
        )
        self.adam_w_mode = int(adam_w_mode)
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients as torch does, by default as ``set_grad_none`` says."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
