"""What torch.compile gets to see of the engine's hooks: nothing.

A compiled block is the forward between its hooks, whether it was compiled before or after the
engine was built: a hook that is disabled makes torch compile the forward by itself. Within a
forward that is compiled no hook may stand, disabled or not: it would break the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

__all__ = ["outside_graphs", "unless_compiling"]

_Hook = TypeVar("_Hook", bound=Callable[..., None])


def outside_graphs(hook: _Hook) -> _Hook:
    """``hook``, run by Python wherever torch meets it: for what is compiled, not for its parts."""
    disabled: _Hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return disabled


def unless_compiling(hook: Callable[[nn.Module, Any], None]) -> Callable[[nn.Module, Any], None]:
    """``hook``, left out of what is compiled around it, which has a hook of its own."""

    def hooked(module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            hook(module, args)

    return hooked
