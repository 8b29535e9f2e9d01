"""Trainable and frozen parameters.

[Note: trainable and frozen]
A parameter is *trainable* if it is in a group of the optimizer when the engine is built, and not of
integers: it has a gradient, a master weight and optimizer state in the layout. Its
``requires_grad`` may be switched off and on between steps, on every rank alike: while it is off no
gradient comes, and a step leaves the parameter and its state alone, as torch's optimizers leave one
without ``.grad``. It keeps its memory, and travels with its unit as before.
Every other parameter is frozen for good: it has values alone, and unfreezing it is an error (see
`zero_core.runtime.param_guard`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn

from zero_core.layout.arithmetic import Layout

_log = logging.getLogger(__name__)


def warn_frozen(layout: Layout, params: Sequence[nn.Parameter]) -> None:
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
