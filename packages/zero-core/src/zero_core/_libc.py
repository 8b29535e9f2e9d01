"""Calls into the C library and the OpenMP runtime."""

from __future__ import annotations

import ctypes
import os
import sys

import torch

_M_ARENA_MAX = -8
"""``M_ARENA_MAX`` in glibc's malloc.h."""


def release_free_pages() -> None:
    """Return freed host memory to the operating system.

    glibc retains freed blocks below 32 MiB that have small live objects next to them. Once a
    model's parameters have moved into the engine's arena, these are a third of the model's size.
    """
    _call("malloc_trim", 0)


def share_arenas() -> None:
    """Make threads that start from now on share the existing malloc arenas.

    By default glibc gives each running thread a separate arena, which retains that thread's peak.
    No effect once the process has had more than 8 arenas. ``MALLOC_ARENA_MAX`` and
    ``glibc.malloc.arena_max`` in ``GLIBC_TUNABLES`` take precedence.
    """
    is_set = "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    if not is_set:
        _call("mallopt", _M_ARENA_MAX, 1)


def use_one_core() -> None:
    """Run torch operations of the calling thread on that thread alone.

    OpenMP gives each calling thread a separate team of threads, which spin while they wait. Next to
    the training thread's team, a second team makes operations ten times slower.
    """
    torch.get_num_threads()  # a thread's first torch call sets its own limit, so make it first
    _call("omp_set_num_threads", 1)


def _call(name: str, *arguments: int) -> None:
    """Call the C function ``name`` if a library loaded in this process has it."""
    if sys.platform == "linux":
        # foreign: musl has no malloc_trim or mallopt, and OpenMP is optional
        function = getattr(ctypes.CDLL(None), name, None)
        if function is not None:
            function(*arguments)
