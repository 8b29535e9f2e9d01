"""Functions of the C library."""

from __future__ import annotations

import ctypes
import sys


def release_free_pages() -> None:
    """Return host memory that was freed to the system, where the C library keeps it.

    Between small objects that stay, glibc keeps pages of large ones that went (below 32 MiB each):
    a third of a model's own memory, once its parameters have moved into an arena.
    """
    if sys.platform == "linux":
        # foreign: the C library; musl has no such function and keeps no pages.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
