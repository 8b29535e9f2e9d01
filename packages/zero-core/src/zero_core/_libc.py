"""Functions of the C library, and of OpenMP's."""

from __future__ import annotations

import ctypes
import os
import sys

import torch

_M_ARENA_MAX = -8
"""Of glibc's malloc.h."""


def release_free_pages() -> None:
    """Return host memory that was freed to the system, where the C library keeps it.

    Between small objects that stay, glibc keeps pages of large ones that went (below 32 MiB each):
    a third of a model's own memory, once its parameters have moved into an arena.
    """
    _call("malloc_trim", 0)


def share_arenas() -> None:
    """Make threads that are started from now on share the malloc arenas there are.

    Otherwise glibc gives each running thread its own arena, which retains that thread's peak. It
    has no effect once the process has had more than 8 arenas. ``MALLOC_ARENA_MAX`` and
    ``glibc.malloc.arena_max`` in ``GLIBC_TUNABLES`` take precedence.
    """
    is_set = "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    if not is_set:
        _call("mallopt", _M_ARENA_MAX, 1)


def use_one_core() -> None:
    """Have torch's operations use the calling thread alone from now on, when it calls them.

    Each thread that calls them has a team of OpenMP's of its own, whose threads spin while they
    wait: beside the team of the training they take ten times what the thread alone does.
    """
    torch.get_num_threads()  # a thread's first call of torch sets its own limit
    _call("omp_set_num_threads", 1)


def _call(name: str, *arguments: int) -> None:
    """Call a function of the libraries that torch has loaded for all, where it is there."""
    if sys.platform == "linux":
        # foreign: musl has none of malloc's, and a build without OpenMP has no teams
        function = getattr(ctypes.CDLL(None), name, None)
        if function is not None:
            function(*arguments)
