"""The update that an offloaded optimizer class stands for, in the terms of a torch optimizer.

[Note: a kernel's own optimizer class]
A package with an Adam kernel may have a torch optimizer over it, as cpu-adam has ``CPUAdam``. Such
a class declares the kernel (`HostKernelOptimizer`). Its update is that kernel's on the host and
that of torch's Adam, which computes the same, on an accelerator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn, optim

from zero_offload.protocols import AdamKernel, Groups, HostKernelOptimizer, OptimizerClass
from zero_offload.rules.resolve import resolve_kernel

_KEPT = ("lr", "betas", "eps", "weight_decay")
_ONLY_SERVED = {"state_dtype": ("float32",), "master_dtype": (None, "float32")}


@dataclass(frozen=True)
class HostUpdate:
    """Optimizer class and kernel that a tier computes an optimizer's update with.

    Attributes:
        defaults: the class's settings, defaults filled in, for ``param_groups``.
        torch_class: the torch optimizer whose update it is.
        kernel: computes it on the host; None for torch.
        is_kernels_own: see [Note: a kernel's own optimizer class].
    """

    defaults: Mapping[str, Any]
    torch_class: OptimizerClass
    kernel: AdamKernel | None
    is_kernels_own: bool

    def groups(self, groups: Groups, *, is_host_alone: bool) -> Groups:
        """Return ``param_groups`` with the settings of `torch_class`.

        Args:
            is_host_alone: no part is updated by torch on an accelerator.

        Raises:
            ValueError: a setting of a kernel's own class that cannot be honoured.
        """
        if not self.is_kernels_own:
            return groups
        return [_as_torch_adam(group, is_host_alone) for group in groups]

    def check_dtypes(self, dtypes: Sequence[torch.dtype]) -> None:
        """Raise ValueError for parameters that a kernel's own class refuses as well."""
        if self.is_kernels_own and torch.float64 in dtypes:
            raise ValueError(
                "the Adam kernel updates fp32, bf16 and fp16 parameters, not float64; use "
                "torch.optim.AdamW"
            )


def resolve_update(
    optimizer_class: OptimizerClass,
    settings: Mapping[str, Any],
    adam_kernel: AdamKernel | str | None,
) -> HostUpdate:
    """Return the update of a class with these keyword arguments, which its constructor checks.

    Raises:
        ValueError: a kernel that is not installed, or a setting that cannot be honoured.
    """
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
    """Every setting, defaults filled in and values checked by the optimizer's constructor."""
    probe = optimizer_class([nn.Parameter(torch.zeros(1, device="cpu"))], **settings)
    return dict(probe.defaults)


@cache
def _adam_defaults() -> Mapping[str, Any]:
    return _defaults(optim.Adam, {})
