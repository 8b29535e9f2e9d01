"""``deepspeed.ops.adam``, ``.adagrad`` and ``.lion``: optimizers with DeepSpeed's signatures.

Those named ``CPU`` are updated by the host kernel with ``offload_optimizer``; ``Fused`` ones on any
device. The arguments that several have:

    params, model_params    parameters, named parameters or groups of them
    betas                   decay of the first and second moment, in [0, 1)
    eps                     added to the denominator
    bias_correction         divide the moments by ``1 - beta ** step``
    adamw_mode, adam_w_mode AdamW; otherwise the weight decay is L2
    amsgrad                 refused with a RuntimeError
    fp32_optimizer_states   False: moments in bf16; of Adam alone, else ValueError
    set_grad_none           what `zero_grad` does without an argument

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
"""The class here that an optimizer of the configuration is an instance of."""


class _Named(ABCMeta):
    """Metaclass of classes that an optimizer of the configuration may answer to."""

    def __instancecheck__(cls, instance: object) -> bool:
        if super().__instancecheck__(instance):
            return True
        return isinstance(instance, torch.optim.Optimizer) and made_as.get(instance) is cls


class DeepSpeedCPUAdam(CPUAdam, metaclass=_Named):
    """`cpu_adam.CPUAdam` with DeepSpeed's signature.

    Given to ``initialize`` with ``offload_optimizer``, the offloaded tier makes its update with the
    same kernel; stepped by itself, it updates parameters in host memory. Parameters may lie
    anywhere when it is made, since the engine may move their state to the host later.
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
        """Add a group, as the same dict, which a scheduler over an earlier optimizer may hold.

        Raises:
            RuntimeError: it asks for ``amsgrad``.
            ValueError: its settings are those of another optimizer.
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
        # Not CPUAdam's, which refuses parameters that are not in host memory yet; its step does.
        torch.optim.Optimizer.add_param_group(self, param_group)
        group = self.param_groups[-1]
        group["decoupled_weight_decay"] = group["adamw_mode"]  # torch's word, which tiers read


class DeepSpeedCPUAdagrad(torch.optim.Adagrad, metaclass=_Named):
    """Adagrad (Duchi et al., 2011) with L2 weight decay.

    The sum of squares is in the state as torch calls it, ``sum``.
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
        _check_fp32_states("DeepSpeedCPUAdagrad", fp32_optimizer_states)
        _refuse_amsgrad("DeepSpeedCPUAdagrad", amsgrad)
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
        self.fp32_optimizer_states = fp32_optimizer_states


class DeepSpeedCPULion(Lion, metaclass=_Named):
    """`zero_core.Lion` with DeepSpeed's defaults.

    The rate is ten times the one of `zero_core.Lion`. ``betas`` are the weight of the momentum in
    the direction, and the decay of the momentum, whose default is not the paper's 0.99. The weight
    decay is decoupled.
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
        """Drop gradients as torch does, by default as ``set_grad_none`` says."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


class FusedAdam(_Fused, Adam):
    """`zero_core.optim.adam.Adam` with DeepSpeed's signature: torch's fused kernel."""

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
"""Classes that DeepSpeed makes on the device, None for torch's, and on the host."""


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
