"""Default and checked thread counts."""

from __future__ import annotations

import operator
import os

from cpu_adam._memory import loaded_torch

# More threads than this never help, and a typing error must not start a million of them.
_MAX_THREADS = 512


def default_num_threads() -> int:
    """Return torch's thread count if torch is loaded, else the process's usable CPUs."""
    torch = loaded_torch()
    if torch is not None:
        return int(torch.get_num_threads())
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resolve_num_threads(num_threads: int | None) -> int:
    """Return the thread count for the argument ``num_threads``.

    Raises:
        TypeError: it is neither None nor an integer.
        ValueError: it is below 1.
    """
    if num_threads is None:
        return min(default_num_threads(), _MAX_THREADS)
    try:
        count = operator.index(num_threads)
    except TypeError:
        raise TypeError(
            f"num_threads: expected an integer or None, got {type(num_threads).__name__}"
        ) from None
    if count < 1:
        raise ValueError(f"num_threads: must be at least 1, got {count}")
    return min(count, _MAX_THREADS)
