"""Check of ``offload_optimizer.parameters`` against the names of the whole model."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from zero_core.errors import ConfigError
from zero_core.layout.arithmetic import Layout


def check_patterns(patterns: Sequence[str], layout: Layout) -> None:
    """Refuse a pattern that matches no trainable parameter of the whole model.

    A tier sees the parameters of its rank alone and cannot check this.

    Raises:
        ConfigError: with the most similar names.
    """
    names = [param.name for param in layout.params if param.is_trainable]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
            raise ConfigError(
                f"zero_optimization.offload_optimizer.parameters: {pattern!r} matches no "
                f"trainable parameter; near it are {near}"
            )
