"""Rules of Adagrad, SGD and Lion, and the choice of the rule for an optimizer class.

Each rule calls one function of the kernel. A kernel needs `adam_step` alone. Optimizers whose
function it has not are updated by torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, optim

from zero_offload.protocols import (
    AdagradKernel,
    AdamKernel,
    Bf16AdamKernel,
    EightBitAdamKernel,
    LionKernel,
    RuledOptimizer,
    SgdKernel,
)
from zero_offload.rules.adam import AdamRule, Bf16AdamRule, EightBitAdamRule
from zero_offload.rules.rule import Rule, Stored, setting
from zero_offload.settings import STATE_DTYPES

_KNOWN: dict[type[optim.Optimizer], str] = {
    optim.Adam: "adam",
    optim.AdamW: "adam",
    optim.Adagrad: "adagrad",
    optim.SGD: "sgd",
}
"""Rules of torch's own classes; a subclass may differ and is not among them."""
_KINDS = ("adam", "adagrad", "sgd", "lion")
"""Values of the class attribute ``update_rule``."""


@dataclass(frozen=True, slots=True)
class _AdagradHyper:
    step: int
    lr: float
    lr_decay: float
    eps: float
    weight_decay: float


class AdagradRule(Rule):
    """Adagrad as torch.optim does it, by ``kernel.adagrad_step`` (Duchi et al., 2011)."""

    states = MappingProxyType({"sum": torch.float32})
    scalars = ("step",)

    def __init__(self, kernel: AdagradKernel) -> None:
        self._kernel = kernel

    def initial(self, name: str, group: Mapping[str, Any]) -> float:
        """Return ``initial_accumulator_value``."""
        return float(group.get("initial_accumulator_value", 0.0))

    def hyper(self, group: Mapping[str, Any], step: int) -> Hashable:
        """Return the settings."""
        names = ("lr", "lr_decay", "eps", "weight_decay")
        numbers = {name: setting(group, name) for name in names}
        return _AdagradHyper(step=step, **numbers), _sign(group)

    def update(
        self,
        master: Tensor | None,
        grad: Tensor,
        stored: Stored,
        hyper: Any,
        grad_scale: float,
        out: Tensor | None,
    ) -> None:
        """Update one span by one kernel pass."""
        numbers, sign = hyper
        self._kernel.adagrad_step(
            master, grad, stored["sum"], out=out, **_call(sign * grad_scale), **asdict(numbers)
        )


@dataclass(frozen=True, slots=True)
class _SgdHyper:
    step: int
    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool


class SgdRule(Rule):
    """Stochastic gradient descent as torch.optim.SGD does it, by ``kernel.sgd_step``.

    Args:
        kernel: see `SgdKernel`.
        has_momentum: keep a momentum buffer.
    """

    def __init__(self, kernel: SgdKernel, *, has_momentum: bool) -> None:
        self._kernel = kernel
        self.states = {"momentum_buffer": torch.float32} if has_momentum else {}

    def hyper(self, group: Mapping[str, Any], step: int) -> Hashable:
        """Return the settings, in which only the first step differs."""
        momentum = setting(group, "momentum")
        if momentum and not self.states:
            raise ValueError(
                "momentum was 0 when the optimizer was made, so there is no momentum_buffer; "
                "start with the momentum that is wanted, or pass adam_kernel=None"
            )
        hyper = _SgdHyper(
            step=min(step, 2),
            lr=setting(group, "lr"),
            momentum=momentum,
            dampening=float(group["dampening"]),
            weight_decay=setting(group, "weight_decay"),
            nesterov=bool(group["nesterov"]),
        )
        return hyper, _sign(group)

    def update(
        self,
        master: Tensor | None,
        grad: Tensor,
        stored: Stored,
        hyper: Any,
        grad_scale: float,
        out: Tensor | None,
    ) -> None:
        """Update one span by one kernel pass."""
        numbers, sign = hyper
        buffer = stored["momentum_buffer"] if numbers.momentum else None
        self._kernel.sgd_step(
            master, grad, buffer, out=out, **_call(sign * grad_scale), **asdict(numbers)
        )


@dataclass(frozen=True, slots=True)
class _LionHyper:
    lr: float
    beta1: float
    beta2: float
    weight_decay: float


class LionRule(Rule):
    """Lion by ``kernel.lion_step`` (Chen et al., 2023, arXiv 2302.06675, algorithm 2)."""

    states = MappingProxyType({"exp_avg": torch.float32})

    def __init__(self, kernel: LionKernel) -> None:
        self._kernel = kernel

    def hyper(self, group: Mapping[str, Any], step: int) -> Hashable:
        """Return the settings, which do not depend on the step."""
        beta1, beta2 = group["betas"]
        hyper = _LionHyper(
            lr=setting(group, "lr"),
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=setting(group, "weight_decay", default=0.0),
        )
        return hyper, _sign(group)

    def update(
        self,
        master: Tensor | None,
        grad: Tensor,
        stored: Stored,
        hyper: Any,
        grad_scale: float,
        out: Tensor | None,
    ) -> None:
        """Update one span by one kernel pass."""
        numbers, sign = hyper
        self._kernel.lion_step(
            master,
            grad,
            stored["exp_avg"],
            out=out,
            **_call(sign * grad_scale),
            **asdict(numbers),
        )


def _call(grad_scale: float) -> dict[str, Any]:
    """Keywords that differ from call to call."""
    return {"grad_scale": grad_scale, "num_threads": torch.get_num_threads()}


def _sign(group: Mapping[str, Any]) -> float:
    """The factor on the gradient that ``maximize`` means: exact, in every rule."""
    return -1.0 if group.get("maximize", False) else 1.0


def _kind(optimizer_class: type[optim.Optimizer]) -> str | None:
    """Name of the rule: torch's own classes by identity, others by ``update_rule``."""
    if optimizer_class in _KNOWN:
        return _KNOWN[optimizer_class]
    declared: object = optimizer_class
    if isinstance(declared, RuledOptimizer) and declared.update_rule in _KINDS:
        return declared.update_rule
    return None


def has_rule(optimizer_class: type[optim.Optimizer]) -> bool:
    """Return whether some kernel can compute the class's update."""
    return _kind(optimizer_class) is not None


def check_kernel_class(optimizer_class: type[optim.Optimizer]) -> None:
    """Raise ValueError unless some kernel can compute the class's update."""
    if not has_rule(optimizer_class):
        raise ValueError(
            f"an adam_kernel computes torch.optim.Adam, AdamW, Adagrad and SGD, and classes whose "
            f"update_rule is one of {_KINDS}, not {optimizer_class.__qualname__}; pass "
            f"adam_kernel=None"
        )


def resolve_rule(
    kernel: Any,
    optimizer_class: type[optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    state_dtype: str = "float32",
) -> Rule | None:
    """Return the rule that computes an optimizer's update by a kernel.

    Args:
        kernel: an `AdamKernel` with whatever other functions it has, or None.
        optimizer_class: torch's ``Adam``, ``AdamW``, ``Adagrad`` or ``SGD``, or a class with the
            attribute ``update_rule`` of "adam", "adagrad", "sgd" or "lion", whose groups have that
            optimizer's settings.
        groups: its ``param_groups``.
        state_dtype: ``"float32"``; ``"bfloat16"`` or ``"int8"`` for Adam and AdamW.

    Returns:
        The rule, or None where torch's own update must do it: there is no kernel or it lacks the
        function, no kernel computes the optimizer, or a setting is torch's alone.

    Raises:
        ValueError: no such ``state_dtype``, or it cannot be served; by name.
    """
    if state_dtype not in STATE_DTYPES:
        raise ValueError(f"state_dtype must be one of {STATE_DTYPES}, got {state_dtype!r}")
    if state_dtype != "float32":
        return _compact_rule(kernel, optimizer_class, groups, state_dtype)
    kind = _kind(optimizer_class)
    if kind == "adam" and isinstance(kernel, AdamKernel) and not _has_amsgrad(groups):
        return AdamRule.of(kernel, optimizer_class)
    if kind == "adagrad" and isinstance(kernel, AdagradKernel):
        return AdagradRule(kernel)
    if kind == "sgd" and isinstance(kernel, SgdKernel) and not _may_start_late(groups):
        return SgdRule(kernel, has_momentum=any(g["momentum"] for g in groups))
    if kind == "lion" and isinstance(kernel, LionKernel):
        return LionRule(kernel)
    return None


def _compact_rule(
    kernel: Any,
    optimizer_class: type[optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    state_dtype: str,
) -> Rule:
    asked = f"offload_optimizer.state_dtype = {state_dtype!r}"
    if _kind(optimizer_class) != "adam":
        raise ValueError(
            f"{asked} is served for Adam and AdamW, not {optimizer_class.__qualname__}: "
            f'use "float32"'
        )
    if _has_amsgrad(groups):
        raise ValueError(f'{asked} is not served with amsgrad: use "float32"')
    if state_dtype == "int8" and isinstance(kernel, EightBitAdamKernel):
        return EightBitAdamRule.of(kernel, optimizer_class)
    if state_dtype == "bfloat16" and isinstance(kernel, Bf16AdamKernel):
        return Bf16AdamRule.of(kernel, optimizer_class)
    function = "adam_step_8bit" if state_dtype == "int8" else "adam_step_bf16"
    found = "there is no host kernel" if kernel is None else f"{kernel!r} has none"
    raise ValueError(
        f"{asked} needs a host kernel with {function}, and {found}: install cpu-adam and name it "
        f'(adam_kernel="cpu", or optimizer.type "Adam" or "AdamW" in a config), or use "float32"'
    )


def _has_amsgrad(groups: Sequence[Mapping[str, Any]]) -> bool:
    return any(group.get("amsgrad", False) for group in groups)


def _may_start_late(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a group without momentum may get one: torch then takes the gradient undampened."""
    momenta = [bool(group["momentum"]) for group in groups]
    return any(momenta) and not all(momenta) and any(group["dampening"] for group in groups)
