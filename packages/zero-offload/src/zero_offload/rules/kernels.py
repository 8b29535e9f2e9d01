"""Installed Adam kernels by name.

Kernels announce themselves under the entry-point group ``zero_core.adam_kernels``. One is loaded
only when it is asked for, and no other with it.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from torch import optim

from zero_offload.protocols import AdamKernel
from zero_offload.rules.resolve import check_kernel_class, has_rule

GROUP = "zero_core.adam_kernels"


def resolve_kernel(
    kernel: AdamKernel | str | None, optimizer_class: type[optim.Optimizer]
) -> AdamKernel | None:
    """Return the kernel for an optimizer class, or None for torch's own update.

    Args:
        kernel: an object or module with ``adam_step``; the name of an entry point; ``"auto"`` for
            an installed kernel (the first by name) if a kernel can compute the class; or None.
        optimizer_class: the update wanted.

    Raises:
        ValueError: no kernel of that name is installed, the object is none, or no kernel computes
            the class.
    """
    if kernel is None:
        return None
    if kernel == "auto":
        found = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
        return _checked(found[0].load()) if found and has_rule(optimizer_class) else None
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
