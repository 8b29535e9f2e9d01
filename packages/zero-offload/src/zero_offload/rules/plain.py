"""Rules with fp32 state whose step is one function of the kernel: Adam, Adagrad, SGD, Lion.

A kernel needs `adam_step` alone. Optimizers whose function it has not are updated by torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, optim

from zero_offload.protocols import AdagradKernel, AdamKernel, LionKernel, OptimizerClass, SgdKernel
from zero_offload.rules.rule import Grad, Rule, Stored, setting

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamRule(Rule):
    """Adam or AdamW with fp32 moments by ``kernel.adam_step``.

    Kingma and Ba, 2015 (arXiv 1412.6980), and Loshchilov and Hutter, 2019 (arXiv 1711.05101). With
    ``is_decoupled`` the weight decay is AdamW's, unless a group says otherwise.
    """

    states = dict.fromkeys(MOMENTS, torch.float32)
    scalars = ("step",)

    def __init__(self, kernel: AdamKernel, *, is_decoupled: bool) -> None:
        super().__init__(kernel)
        self._is_decoupled = is_decoupled

    @classmethod
    def of(cls, kernel: Any, optimizer_class: OptimizerClass) -> AdamRule:
        """Return the rule of ``torch.optim.Adam`` or ``AdamW``."""
        return cls(kernel, is_decoupled=issubclass(optimizer_class, optim.AdamW))

    def keywords(self, group: Mapping[str, Any], step: int) -> dict[str, Any]:
        if group.get("amsgrad", False):
            raise ValueError(
                "amsgrad is not served by a host kernel; set it before the optimizer is made, or "
                "pass adam_kernel=None for torch's own update"
            )
        return {
            "step": step,
            **_rate_and_betas(group),
            "eps": setting(group, "eps"),
            "weight_decay": setting(group, "weight_decay"),
            "adamw_mode": bool(group.get("decoupled_weight_decay", self._is_decoupled)),
            "bias_correction": bool(group.get("bias_correction", True)),
        }

    def call(self, master: Tensor | None, grad: Grad, stored: Stored, **kw: Any) -> None:
        self._kernel.adam_step(master, grad, *(stored[name] for name in MOMENTS), **kw)


class AdagradRule(Rule):
    """Adagrad as torch.optim does it, by ``kernel.adagrad_step`` (Duchi et al., 2011)."""

    states = MappingProxyType({"sum": torch.float32})
    scalars = ("step",)
    _kernel: AdagradKernel

    def initial(self, name: str, group: Mapping[str, Any]) -> float:
        return float(group.get("initial_accumulator_value", 0.0))

    def keywords(self, group: Mapping[str, Any], step: int) -> dict[str, Any]:
        names = ("lr", "lr_decay", "eps", "weight_decay")
        return {"step": step, **{name: setting(group, name) for name in names}}

    def call(self, master: Tensor | None, grad: Grad, stored: Stored, **kw: Any) -> None:
        self._kernel.adagrad_step(master, grad, stored["sum"], **kw)


class SgdRule(Rule):
    """Stochastic gradient descent as torch.optim.SGD does it, by ``kernel.sgd_step``."""

    def __init__(self, kernel: SgdKernel, *, has_momentum: bool) -> None:
        super().__init__(kernel)
        self.states = {"momentum_buffer": torch.float32} if has_momentum else {}

    def keywords(self, group: Mapping[str, Any], step: int) -> dict[str, Any]:
        momentum = setting(group, "momentum")
        if momentum and not self.states:
            raise ValueError(
                "momentum was 0 when the optimizer was made, so there is no momentum_buffer; "
                "start with the momentum that is wanted, or pass adam_kernel=None"
            )
        return {
            "step": min(step, 2),  # only the first step differs
            "lr": setting(group, "lr"),
            "momentum": momentum,
            "dampening": float(group["dampening"]),
            "weight_decay": setting(group, "weight_decay"),
            "nesterov": bool(group["nesterov"]),
        }

    def call(self, master: Tensor | None, grad: Grad, stored: Stored, **kw: Any) -> None:
        buffer = stored["momentum_buffer"] if kw["momentum"] else None
        self._kernel.sgd_step(master, grad, buffer, **kw)


class LionRule(Rule):
    """Lion by ``kernel.lion_step`` (Chen et al., 2023, arXiv 2302.06675, algorithm 2)."""

    states = MappingProxyType({"exp_avg": torch.float32})
    _kernel: LionKernel

    def keywords(self, group: Mapping[str, Any], step: int) -> dict[str, Any]:
        decay = setting(group, "weight_decay", default=0.0)
        return {**_rate_and_betas(group), "weight_decay": decay}

    def call(self, master: Tensor | None, grad: Grad, stored: Stored, **kw: Any) -> None:
        self._kernel.lion_step(master, grad, stored["exp_avg"], **kw)


def _rate_and_betas(group: Mapping[str, Any]) -> dict[str, float]:
    beta1, beta2 = group["betas"]
    return {"lr": setting(group, "lr"), "beta1": float(beta1), "beta2": float(beta2)}
