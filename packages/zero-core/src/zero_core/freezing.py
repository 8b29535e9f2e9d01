"""Which parameters may be trained, and which are frozen for now or for good.

[Note: trainable and frozen]
A parameter is *trainable* if it is in a group of the optimizer when the engine is built, and not of
integers: it has a gradient, a master weight and optimizer state in the layout. Its
``requires_grad`` may be switched off and on between steps, on every rank alike: while it is off no
gradient comes, and a step leaves the parameter and its state alone, as torch's optimizers leave one
without ``.grad``. It keeps its memory, and travels with its unit as before.
Every other parameter is frozen for good: it has values alone, and unfreezing it is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zero_core.compiling import outside_graphs
from zero_core.layout import Layout
from zero_core.segment_values import SegmentValues

__all__ = ["FrozenGuard", "hook_gradient", "tell_frozen"]

_log = logging.getLogger(__name__)


class FrozenGuard:
    """Refuses to train a parameter that is frozen for good; see [Note: trainable and frozen]."""

    def __init__(self, layout: Layout, values: Sequence[SegmentValues]) -> None:
        """Watch the parameters of ``values`` that are not trainable in ``layout``."""
        self._frozen = [
            (layout.params[slot.param].name, param)
            for v in values
            if not v.segment.is_trainable
            for slot, param in zip(v.segment.slots, v.params, strict=True)
        ]

    def watch(self, model: nn.Module) -> Any:
        """Check before each forward of ``model`` with gradients; the handle of the hook."""

        def hook(module: nn.Module, args: Any) -> None:
            if torch.is_grad_enabled():
                self.check()

        return model.register_forward_pre_hook(outside_graphs(hook))

    def check(self) -> None:
        """Raise if one of them requires a gradient.

        Raises:
            RuntimeError: with the parameter's name.
        """
        for name, param in self._frozen:
            if param.requires_grad:
                raise RuntimeError(
                    f"parameter {name} requires a gradient now, but was in no optimizer group when "
                    "the engine was built: nothing would update it. Freeze it again; or build the "
                    "engine while it requires a gradient (or with an optimizer over it), and "
                    "freeze it after build() until it is to be trained"
                )


def hook_gradient(param: nn.Parameter, hook: Callable[[nn.Parameter], None]) -> Any:
    """Have ``hook`` called after each gradient of ``param``, which may be frozen for now."""
    is_required = param.requires_grad
    param.requires_grad_(True)  # torch hooks no other; the hook stays when it is switched off
    handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    param.requires_grad_(is_required)
    return handle


def tell_frozen(layout: Layout, params: Sequence[nn.Parameter]) -> None:
    """Warn of memory kept for parameters that are frozen for now."""
    found = [
        spec
        for spec, param in zip(layout.params, params, strict=True)
        if spec.is_trainable and not param.requires_grad
    ]
    if found:
        _log.warning(
            "%d parameters (%d elements; the first is %s) require no gradient but are in an "
            "optimizer group: memory is kept for their gradients, master weights and optimizer "
            "states, so that they can be unfrozen. If they never will be, leave them out of the "
            "optimizer",
            len(found),
            sum(spec.numel for spec in found),
            found[0].name,
        )
