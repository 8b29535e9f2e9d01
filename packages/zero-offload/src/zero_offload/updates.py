"""Which update an optimizer class stands for: torch's own, or that of an Adam kernel.

[Note: a kernel's own optimizer class]
A package with an Adam kernel may have a torch optimizer over it, as cpu-adam has ``CPUAdam``. It is
recognised by shape: the top-level package of the class has ``adam_step`` itself, and the class has
the settings ``adamw_mode`` and ``bias_correction``. The package is loaded, since the class is
there; nothing is imported and no name is compared. The update is then that kernel's on the host,
and torch's Adam, which computes the same, on an accelerator.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn, optim

from zero_offload.kernels import resolve_kernel
from zero_offload.protocols import AdamKernel

__all__ = ["Update"]

_MARKS = frozenset({"adamw_mode", "bias_correction"})
_KEPT = ("lr", "betas", "eps", "weight_decay")
_ALONE_SERVED = {"state_dtype": ("float32",), "master_dtype": (None, "float32")}


@dataclass(frozen=True)
class Update:
    """What a tier is asked to compute for an optimizer class.

    Attributes:
        defaults: the class's settings, defaults filled in, for ``param_groups``.
        torch_class: the torch optimizer whose update it is.
        kernel: what computes it on the host; None for torch.
        is_kernels_own: see [Note: a kernel's own optimizer class].
    """

    defaults: Mapping[str, Any]
    torch_class: type[optim.Optimizer]
    kernel: AdamKernel | None
    is_kernels_own: bool

    @classmethod
    def of(
        cls,
        optimizer_class: type[optim.Optimizer],
        settings: Mapping[str, Any],
        adam_kernel: AdamKernel | str | None,
    ) -> Update:
        """The update of a class with these keyword arguments, which its constructor checks.

        Raises:
            ValueError: a kernel that is not there, or a setting that cannot be honoured.
        """
        defaults = _defaults(optimizer_class, settings)
        own = _kernel_behind(optimizer_class, defaults)
        if own is None:
            kernel = resolve_kernel(adam_kernel, optimizer_class)
            return cls(defaults, optimizer_class, kernel, is_kernels_own=False)
        for name in sorted(set(settings) - set(defaults)):
            if settings[name] is not None:
                raise ValueError(
                    f"{name} = {settings[name]!r} of {optimizer_class.__qualname__} is not served "
                    f"by OffloadedOptimizer; leave it out"
                )
        given = None if adam_kernel is None else resolve_kernel(adam_kernel, optim.Adam)
        return cls(defaults, optim.Adam, given or own, is_kernels_own=True)

    def groups(
        self, groups: Sequence[Mapping[str, Any]], *, is_host_alone: bool
    ) -> Sequence[Mapping[str, Any]]:
        """``param_groups`` in the words of `torch_class`.

        Args:
            groups: the optimizer's own.
            is_host_alone: no part is updated by torch on an accelerator.

        Raises:
            ValueError: a setting of a kernel's own class that cannot be honoured.
        """
        if not self.is_kernels_own:
            return groups
        return [self._in_torchs_words(group, is_host_alone) for group in groups]

    def check_dtypes(self, dtypes: Sequence[torch.dtype]) -> None:
        """ValueError for parameters that a kernel's own class would refuse as well."""
        if self.is_kernels_own and torch.float64 in dtypes:
            raise ValueError(
                "the Adam kernel updates fp32, bf16 and fp16 parameters, not float64; use "
                "torch.optim.AdamW"
            )

    def _in_torchs_words(self, group: Mapping[str, Any], is_host_alone: bool) -> dict[str, Any]:
        for name, served in _ALONE_SERVED.items():
            if group.get(name, served[0]) not in served:
                raise ValueError(
                    f"{name} = {group[name]!r} is not served by OffloadedOptimizer, which keeps "
                    f"fp32 masters and moments; leave it out"
                )
        if not group.get("bias_correction", True) and not is_host_alone:
            raise ValueError(
                "bias_correction = False is computed by the host's kernel alone, not on an "
                "accelerator; use ratio=1 or leave it out"
            )
        is_decoupled = group.get("adamw_mode", group.get("decoupled_weight_decay", True))
        return {
            **_adam_defaults(),
            **{name: group[name] for name in _KEPT},
            "decoupled_weight_decay": is_decoupled,
            "bias_correction": group.get("bias_correction", True),
            "amsgrad": group.get("amsgrad", False),
            "maximize": group.get("maximize", False),
        }


def _defaults(
    optimizer_class: type[optim.Optimizer], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Every setting, defaults filled in and values checked by the optimizer's constructor."""
    probe = optimizer_class([nn.Parameter(torch.zeros(1, device="cpu"))], **settings)
    return dict(probe.defaults)


@cache
def _adam_defaults() -> Mapping[str, Any]:
    return _defaults(optim.Adam, {})


def _kernel_behind(
    optimizer_class: type[optim.Optimizer], defaults: Mapping[str, Any]
) -> AdamKernel | None:
    """The Adam kernel that the class is over; see [Note: a kernel's own optimizer class]."""
    package = sys.modules.get(optimizer_class.__module__.partition(".")[0])
    if isinstance(package, AdamKernel) and defaults.keys() >= _MARKS:
        return package
    return None
