"""Choice of the host kernel and the update rule for an optimizer class.

A kernel's name is that of its entry point in the group ``zero_core.adam_kernels``.

An optimizer is elementwise if the new value and state of an element depend only on settings, step
counts, and the element's value, gradient and state. Only such an optimizer can update one part of a
parameter on the host and another on the device (Twin-Flow, ZeRO-Offload++).

[Note: a kernel's own optimizer class]
A kernel package may have a torch optimizer class, such as cpu-adam's ``CPUAdam``, which declares
its kernel (`HostKernelOptimizer`). By default the host then uses this kernel. An accelerator uses
torch's Adam with the same settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import nn, optim

from zero_offload.protocols import (
    AdagradKernel,
    AdamKernel,
    Bf16AdamKernel,
    EightBitAdamKernel,
    ElementwiseOptimizer,
    Groups,
    HostKernelOptimizer,
    LionKernel,
    OptimizerClass,
    RuledOptimizer,
    SgdKernel,
)
from zero_offload.rules.compact import Bf16AdamRule, EightBitAdamRule
from zero_offload.rules.rule import AdagradRule, AdamRule, LionRule, Rule, SgdRule
from zero_offload.settings import INSTALL, check_state_dtype

ELEMENTWISE: frozenset[OptimizerClass] = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
"""Torch's elementwise optimizers. A subclass may differ and is not included."""


def check_elementwise(optimizer_class: OptimizerClass) -> None:
    """Raise ValueError unless the class is in `ELEMENTWISE` or has ``is_elementwise = True``."""
    if optimizer_class in ELEMENTWISE:
        return
    declared: object = optimizer_class
    if isinstance(declared, ElementwiseOptimizer) and declared.is_elementwise is True:
        return
    known = ", ".join(sorted(cls.__name__ for cls in ELEMENTWISE))
    name = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
    raise ValueError(
        f"{name} cannot be offloaded: its update is not known to be elementwise. Use one of "
        f"{known}, or, if each element is updated by itself, set `is_elementwise = True` on the "
        f"class."
    )


GROUP = "zero_core.adam_kernels"
_KNOWN: dict[OptimizerClass, str] = {
    optim.Adam: "adam",
    optim.AdamW: "adam",
    optim.Adagrad: "adagrad",
    optim.SGD: "sgd",
}
"""Names of the rules of torch's classes. A subclass may differ and is not included."""
_KINDS = ("adam", "adagrad", "sgd", "lion")
"""Values of an optimizer class's ``update_rule`` that select a rule."""


def resolve_kernel(
    kernel: AdamKernel | str | None, optimizer_class: OptimizerClass
) -> AdamKernel | None:
    """Return the kernel for an optimizer class, or None for torch's own update.

    ``kernel`` is an object with ``adam_step``, the name of an entry point, or None. ``"auto"`` is
    the alphabetically first entry point, or None if there is none or the class has no update rule.
    """
    if kernel is None:
        return None
    if kernel == "auto":
        found = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
        return _checked(found[0].load()) if found and _kind(optimizer_class) else None
    check_kernel_class(optimizer_class)
    if not isinstance(kernel, str):
        return _checked(kernel)
    matches = tuple(entry_points(group=GROUP, name=kernel))
    if not matches:
        installed = sorted(entry.name for entry in entry_points(group=GROUP))
        what = f"no Adam kernel {kernel!r} is installed, only {installed}"
        raise ValueError(f'{what}; "cpu" is in cpu-adam: {INSTALL.format("cpu-adam")}')
    return _checked(matches[0].load())


def _checked(kernel: Any) -> AdamKernel:
    if not isinstance(kernel, AdamKernel):
        raise ValueError(f"an Adam kernel needs a function adam_step; {kernel!r} has none")
    return kernel


def _kind(optimizer_class: OptimizerClass) -> str | None:
    """Return the name of a class's rule, from `_KNOWN` or ``update_rule``, or None."""
    if optimizer_class in _KNOWN:
        return _KNOWN[optimizer_class]
    declared: object = optimizer_class
    if isinstance(declared, RuledOptimizer) and declared.update_rule in _KINDS:
        return declared.update_rule
    return None


def check_kernel_class(optimizer_class: OptimizerClass) -> None:
    if _kind(optimizer_class) is None:
        raise ValueError(
            f"an adam_kernel computes torch.optim.Adam, AdamW, Adagrad and SGD, and classes whose "
            f"update_rule is one of {_KINDS}, not {optimizer_class.__qualname__}; pass "
            f"adam_kernel=None"
        )


def resolve_rule(
    kernel: Any, optimizer_class: OptimizerClass, groups: Groups, state_dtype: str = "float32"
) -> Rule | None:
    """Return the rule that computes an optimizer's update by a kernel, or None for torch.

    Torch updates if the class has no rule, ``kernel`` lacks its function, or only torch supports a
    setting. With 16-bit or 8-bit states these cases, and rules other than Adam's, raise ValueError.
    """
    if check_state_dtype(state_dtype) != "float32":
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
    kernel: Any, optimizer_class: OptimizerClass, groups: Groups, state_dtype: str
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
        f"{asked} needs a host kernel with {function}, and {found}: {INSTALL.format('cpu-adam')} "
        'and name it (adam_kernel="cpu", or optimizer.type "Adam" or "AdamW" in a config), or use '
        '"float32"'
    )


def _has_amsgrad(groups: Groups) -> bool:
    return any(group.get("amsgrad", False) for group in groups)


def _may_start_late(groups: Groups) -> bool:
    """Return whether momentum may start after step 1. Only torch then skips the first dampening."""
    momenta = [bool(group["momentum"]) for group in groups]
    return any(momenta) and not all(momenta) and any(group["dampening"] for group in groups)


_KEPT = ("lr", "betas", "eps", "weight_decay")
_ONLY_SERVED = {"state_dtype": ("float32",), "master_dtype": (None, "float32")}


@dataclass(frozen=True)
class HostUpdate:
    """Kernel and torch class that compute an optimizer's update.

    ``defaults`` are the optimizer class's defaults with the caller's settings. ``is_kernels_own``:
    whether the class declares its kernel, see [Note: a kernel's own optimizer class].
    """

    defaults: Mapping[str, Any]
    torch_class: OptimizerClass
    kernel: AdamKernel | None
    is_kernels_own: bool

    def groups(self, groups: Groups, *, is_host_alone: bool) -> Groups:
        """Return the groups with the settings of `torch_class`, or raise ValueError."""
        if not self.is_kernels_own:
            return groups
        return [_as_torch_adam(group, is_host_alone) for group in groups]


def resolve_update(
    optimizer_class: OptimizerClass,
    settings: Mapping[str, Any],
    adam_kernel: AdamKernel | str | None,
) -> HostUpdate:
    """Return an optimizer class's update. ``settings`` are arguments of its constructor."""
    defaults = _defaults(optimizer_class, settings)
    declared: object = optimizer_class
    if not isinstance(declared, HostKernelOptimizer):
        kernel = resolve_kernel(adam_kernel, optimizer_class)
        return HostUpdate(defaults, optimizer_class, kernel, is_kernels_own=False)
    for name in sorted(set(settings) - set(defaults)):
        if settings[name] is not None:
            raise ValueError(
                f"{name} = {settings[name]!r} of {optimizer_class.__qualname__} is not served "
                f"by OffloadedOptimizer; leave it out"
            )
    own = declared.host_kernel if adam_kernel is None else adam_kernel
    return HostUpdate(defaults, optim.Adam, resolve_kernel(own, optim.Adam), is_kernels_own=True)


def _as_torch_adam(group: Mapping[str, Any], is_host_alone: bool) -> dict[str, Any]:
    for name, served in _ONLY_SERVED.items():
        if group.get(name, served[0]) not in served:
            raise ValueError(
                f"{name} = {group[name]!r} is not served by OffloadedOptimizer, which keeps "
                f"fp32 masters and moments; leave it out"
            )
    has_correction = group.get("bias_correction", True)
    if not has_correction and not is_host_alone:
        raise ValueError(
            "bias_correction = False is computed by the host's kernel alone, not on an "
            "accelerator; use ratio=1 or leave it out"
        )
    return {
        **_adam_defaults(),
        **{name: group[name] for name in _KEPT},
        "decoupled_weight_decay": group.get(
            "adamw_mode", group.get("decoupled_weight_decay", True)
        ),
        "bias_correction": has_correction,
        "amsgrad": group.get("amsgrad", False),
        "maximize": group.get("maximize", False),
    }


def _defaults(optimizer_class: OptimizerClass, settings: Mapping[str, Any]) -> dict[str, Any]:
    probe = optimizer_class([nn.Parameter(torch.zeros(1, device="cpu"))], **settings)
    return dict(probe.defaults)


@cache
def _adam_defaults() -> Mapping[str, Any]:
    return _defaults(optim.Adam, {})
