"""Default and checked thread counts."""

from __future__ import annotations

import operator
import os

from cpu_adam._memory import loaded_torch

# More threads than this never help, and a typing error must not start a million of them.
_MAX_THREADS = 512


def resolve_num_threads(num_threads: int | None) -> int:
    """Return the thread count for the argument ``num_threads``.

    None is torch's thread count if torch is loaded, else the number of the process's usable CPUs.

    Raises:
        TypeError: it is neither None nor an integer.
        ValueError: it is below 1.
    """
    if num_threads is None:
        if (torch := loaded_torch()) is not None:
            num_threads = torch.get_num_threads()
        elif hasattr(os, "sched_getaffinity"):
            num_threads = len(os.sched_getaffinity(0))
        else:
            num_threads = os.cpu_count() or 1
    try:
        count = operator.index(num_threads)
    except TypeError:
        raise TypeError(
            f"num_threads: expected an integer or None, got {type(num_threads).__name__}"
        ) from None
    if count < 1:
        raise ValueError(f"num_threads: must be at least 1, got {count}")
    return min(count, _MAX_THREADS)
