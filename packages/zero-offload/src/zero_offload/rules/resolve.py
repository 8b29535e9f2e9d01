"""Choice of an installed kernel and of the rule for an optimizer class.

Kernels announce themselves under the entry-point group ``zero_core.adam_kernels``. One is loaded
only when it is asked for, and no other with it.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from torch import optim

from zero_offload.protocols import (
    AdagradKernel,
    AdamKernel,
    Bf16AdamKernel,
    EightBitAdamKernel,
    Groups,
    LionKernel,
    OptimizerClass,
    RuledOptimizer,
    SgdKernel,
)
from zero_offload.rules.compact import Bf16AdamRule, EightBitAdamRule
from zero_offload.rules.plain import AdagradRule, AdamRule, LionRule, SgdRule
from zero_offload.rules.rule import Rule
from zero_offload.settings import check_state_dtype

GROUP = "zero_core.adam_kernels"
_KNOWN: dict[OptimizerClass, str] = {
    optim.Adam: "adam",
    optim.AdamW: "adam",
    optim.Adagrad: "adagrad",
    optim.SGD: "sgd",
}
"""Rules of torch's own classes; a subclass may differ and is not among them."""
_KINDS = ("adam", "adagrad", "sgd", "lion")
"""Values of the class attribute ``update_rule``."""


def resolve_kernel(
    kernel: AdamKernel | str | None, optimizer_class: OptimizerClass
) -> AdamKernel | None:
    """Return the kernel for an optimizer class, or None for torch's own update.

    Args:
        kernel: an object or module with ``adam_step``; the name of an entry point; ``"auto"`` for
            an installed kernel (the first by name) if a kernel can compute the class; or None.

    Raises:
        ValueError: no kernel of that name is installed, the object is none, or no kernel computes
            the class.
    """
    if kernel is None:
        return None
    if kernel == "auto":
        found = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
        return _checked(found[0].load()) if found and _kind(optimizer_class) else None
    check_kernel_class(optimizer_class)
    return _named(kernel) if isinstance(kernel, str) else _checked(kernel)


def _named(name: str) -> AdamKernel:
    matches = tuple(entry_points(group=GROUP, name=name))
    if not matches:
        installed = sorted(entry.name for entry in entry_points(group=GROUP))
        raise ValueError(
            f"no Adam kernel {name!r} is installed, only {installed}; "
            f"`pip install zero-offload[cpu-adam]` brings one"
        )
    return _checked(matches[0].load())


def _checked(kernel: Any) -> AdamKernel:
    if not isinstance(kernel, AdamKernel):
        raise ValueError(f"an Adam kernel needs a function adam_step; {kernel!r} has none")
    return kernel


def _kind(optimizer_class: OptimizerClass) -> str | None:
    """Name of the rule: torch's own classes by identity, others by ``update_rule``."""
    if optimizer_class in _KNOWN:
        return _KNOWN[optimizer_class]
    declared: object = optimizer_class
    if isinstance(declared, RuledOptimizer) and declared.update_rule in _KINDS:
        return declared.update_rule
    return None


def check_kernel_class(optimizer_class: OptimizerClass) -> None:
    """Raise ValueError unless some kernel can compute the class's update."""
    if _kind(optimizer_class) is None:
        raise ValueError(
            f"an adam_kernel computes torch.optim.Adam, AdamW, Adagrad and SGD, and classes whose "
            f"update_rule is one of {_KINDS}, not {optimizer_class.__qualname__}; pass "
            f"adam_kernel=None"
        )


def resolve_rule(
    kernel: Any, optimizer_class: OptimizerClass, groups: Groups, state_dtype: str = "float32"
) -> Rule | None:
    """Return the rule that computes an optimizer's update by a kernel.

    Args:
        kernel: an `AdamKernel` with whatever other functions it has, or None.
        optimizer_class: torch's ``Adam``, ``AdamW``, ``Adagrad`` or ``SGD``, or a class with the
            attribute ``update_rule`` of "adam", "adagrad", "sgd" or "lion", whose groups have that
            optimizer's settings.
        state_dtype: ``"float32"``; ``"bfloat16"`` or ``"int8"`` for Adam and AdamW.

    Returns:
        The rule, or None where torch's own update must do it: there is no kernel or it lacks the
        function, no kernel computes the optimizer, or a setting is torch's alone.

    Raises:
        ValueError: no such ``state_dtype``, or it cannot be served; by name.
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
        f"{asked} needs a host kernel with {function}, and {found}: install cpu-adam and name it "
        f'(adam_kernel="cpu", or optimizer.type "Adam" or "AdamW" in a config), or use "float32"'
    )


def _has_amsgrad(groups: Groups) -> bool:
    return any(group.get("amsgrad", False) for group in groups)


def _may_start_late(groups: Groups) -> bool:
    """Whether a group without momentum may get one: torch then takes the gradient undampened."""
    momenta = [bool(group["momentum"]) for group in groups]
    return any(momenta) and not all(momenta) and any(group["dampening"] for group in groups)
