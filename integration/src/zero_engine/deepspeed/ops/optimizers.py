"""``deepspeed.ops.adam``, ``.adagrad`` and ``.lion``: optimizers with DeepSpeed's signatures.

With ``offload_optimizer``, also for ``Fused`` classes, the host kernel computes the update. Common
arguments:

    params, model_params    parameters, named parameters or groups
    betas                   decay of the first and second moment, in [0, 1)
    eps                     added to the denominator
    bias_correction         divide the moments by ``1 - beta ** step``
    adamw_mode, adam_w_mode True: AdamW. False: Adam with L2 weight decay
    amsgrad                 True: RuntimeError
    fp32_optimizer_states   False: moments in bf16 (Adam), or ValueError (Adagrad, Lion)
    set_grad_none           default of the argument of `zero_grad`

A setting that is out of range raises ValueError.
"""

from __future__ import annotations

import weakref
from abc import ABCMeta
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from cpu_adam import CPUAdam
from zero_core import Lion
from zero_core.adapters import Adam

made_as: weakref.WeakKeyDictionary[torch.optim.Optimizer, type] = weakref.WeakKeyDictionary()
"""Class of this module that ``isinstance`` also accepts, by optimizer."""


class _Named(ABCMeta):
    """Metaclass whose ``isinstance`` also accepts the optimizers in `made_as`."""

    def __instancecheck__(cls, instance: object) -> bool:
        if super().__instancecheck__(instance):
            return True
        return isinstance(instance, torch.optim.Optimizer) and made_as.get(instance) is cls


class DeepSpeedCPUAdam(CPUAdam, metaclass=_Named):
    """`cpu_adam.CPUAdam` with DeepSpeed's signature.

    Parameters on a device are accepted, because the engine may move their state to the host.
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
        _refuse_amsgrad("DeepSpeedCPUAdam", amsgrad)
        super().__init__(
            model_params,
            lr,
            betas,
            eps,
            weight_decay,
            bias_correction=bias_correction,
            adamw_mode=adamw_mode,
            state_dtype="float32" if fp32_optimizer_states else "bfloat16",
        )
        self.adam_w_mode = adamw_mode
        self.fp32_optimizer_states = fp32_optimizer_states

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add ``param_group`` itself, not a copy, because a scheduler may hold that dict.

        Raises RuntimeError for ``amsgrad``, and ValueError if ``eps`` is no number.
        """
        _refuse_amsgrad("DeepSpeedCPUAdam", param_group.get("amsgrad", False))
        eps = param_group.get("eps", 0.0)
        if not isinstance(eps, float | int):
            raise ValueError(
                f"DeepSpeedCPUAdam: eps = {eps!r} is no number: the group is another optimizer's. "
                "accelerate puts DeepSpeedCPUAdam in the place of the optimizer that it is given "
                "if there is offload_optimizer: to keep yours (Adafactor, 8-bit ones), set "
                '"zero_force_ds_cpu_optimizer": false in the configuration'
            )
        # CPUAdam's method would refuse parameters outside host memory, as `step` does.
        torch.optim.Optimizer.add_param_group(self, param_group)
        group = self.param_groups[-1]
        group["decoupled_weight_decay"] = group["adamw_mode"]  # offloaded tiers read torch's key


class DeepSpeedCPUAdagrad(torch.optim.Adagrad, metaclass=_Named):
    """Adagrad (Duchi et al., 2011) with L2 weight decay. The state is torch's ``sum``."""

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
        _check_fp32_states("DeepSpeedCPUAdagrad", fp32_optimizer_states)
        _refuse_amsgrad("DeepSpeedCPUAdagrad", amsgrad)
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
        self.fp32_optimizer_states = fp32_optimizer_states


class DeepSpeedCPULion(Lion, metaclass=_Named):
    """`zero_core.Lion` with DeepSpeed's defaults.

    ``betas`` are the weight of the momentum in the update's direction, and the momentum's decay.
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
        _check_fp32_states("DeepSpeedCPULion", fp32_optimizer_states)
        super().__init__(model_params, lr, betas, weight_decay)
        self.fp32_optimizer_states = fp32_optimizer_states


class _Fused(torch.optim.Optimizer, metaclass=_Named):
    set_grad_none: bool

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


class FusedAdam(_Fused, Adam):
    """`zero_core.optim.adam.Adam` with DeepSpeed's signature."""

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
        _refuse_amsgrad("FusedAdam", amsgrad)
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


class FusedLion(_Fused, Lion):
    """`zero_core.Lion` with the defaults of `DeepSpeedCPULion`."""

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


CLASSES: Mapping[str, tuple[type | None, type]] = {
    "adam": (FusedAdam, DeepSpeedCPUAdam),
    "adamw": (FusedAdam, DeepSpeedCPUAdam),
    "adagrad": (None, DeepSpeedCPUAdagrad),
    "lion": (FusedLion, DeepSpeedCPULion),
}
"""DeepSpeed's classes on the device (None: torch's own) and on the host."""


def _check_fp32_states(optimizer: str, is_fp32: bool) -> None:
    if not is_fp32:
        raise ValueError(
            f"{optimizer}: fp32_optimizer_states=False is not served; give "
            'zero_optimization.offload_optimizer.state_dtype = "bfloat16" in the configuration, '
            "or make a cpu_adam.CPUAdam(..., state_dtype='bfloat16')"
        )


def _refuse_amsgrad(optimizer: str, asked: bool) -> None:
    if asked:
        raise RuntimeError(
            f"{optimizer} does not support the AMSGrad variant; torch.optim.AdamW(amsgrad=True) "
            "can be given to initialize() as an object"
        )
