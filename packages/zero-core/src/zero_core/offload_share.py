"""Which share of the optimizer state ``offload_optimizer`` gives to the host.

The tier that is installed decides it, element by element. Here is what the engine itself must know
of it: whether the patterns name anything, and how large the share will be.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from zero_core.config import OffloadOptimizerConfig
from zero_core.errors import ConfigError
from zero_core.layout import Layout

__all__ = ["check_patterns", "planned_ratio"]


def check_patterns(patterns: Sequence[str], layout: Layout) -> None:
    """Refuse a pattern that matches no trainable parameter of the whole model.

    A tier sees the parameters of its rank alone and cannot tell.

    Raises:
        ConfigError: with names that come near.
    """
    names = [param.name for param in layout.params if param.is_trainable]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
            raise ConfigError(
                f"zero_optimization.offload_optimizer.parameters: {pattern!r} matches no "
                f"trainable parameter; near it are {near}"
            )


def planned_ratio(
    offload: OffloadOptimizerConfig, layout: Layout, device_bytes: Callable[[float], int]
) -> float:
    """The share of the elements that the host is planned to hold; 0 without offload.

    With "auto" it is 1, where the search begins: it takes no more of the device than is free. With
    ``parameters`` it is that of their elements, as if they came first.

    Args:
        offload: the block of the configuration.
        layout: the model's.
        device_bytes: of the state that a ratio leaves on the device; falls as the ratio grows.
    """
    if offload.device == "none":
        return 0.0
    if offload.parameters is not None:
        check_patterns(offload.parameters, layout)
        return _named_share(offload.parameters, layout)
    if offload.device_budget is not None:
        return _least_ratio(offload.device_budget, device_bytes)
    return 1.0 if offload.ratio is None or offload.ratio == "auto" else offload.ratio


def _named_share(patterns: Sequence[str], layout: Layout) -> float:
    trainable = [param for param in layout.params if param.is_trainable]
    named = [p for p in trainable if any(fnmatchcase(p.name, pattern) for pattern in patterns)]
    return sum(p.numel for p in named) / max(sum(p.numel for p in trainable), 1)


def _least_ratio(budget: int, device_bytes: Callable[[float], int]) -> float:
    """The smallest ratio, to a millionth, that stays within the budget; found by bisection."""
    low, high, steps = 0, 10**6, 10**6
    while low < high:
        middle = (low + high) // 2
        if device_bytes(middle / steps) <= budget:
            high = middle
        else:
            low = middle + 1
    return low / steps
