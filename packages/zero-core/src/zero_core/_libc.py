"""Calls into the C library and the OpenMP runtime."""

from __future__ import annotations

import ctypes
import sys

import torch


def release_free_pages() -> None:
    """Make glibc return freed memory to the operating system. Does nothing with other C libraries.

    glibc retains freed blocks below 32 MiB that have small live objects next to them. After a
    model's parameters have moved to the engine's memory, such blocks can be a third of its size.
    """
    _call("malloc_trim", 0)


def use_one_core() -> None:
    """Make torch operations of the calling thread use no other threads (Linux with OpenMP).

    OpenMP gives each calling thread a separate team of threads, which spin while they wait. Next to
    the training thread's team, a second team can make operations ten times slower.
    """
    torch.get_num_threads()  # a thread's first torch call resets the limit, so make one before
    _call("omp_set_num_threads", 1)


def _call(name: str, *arguments: int) -> None:
    """Call the C function ``name`` on Linux, if a library loaded in this process has it."""
    if sys.platform == "linux":
        # foreign: musl has no malloc_trim, and OpenMP is optional
        function = getattr(ctypes.CDLL(None), name, None)
        if function is not None:
            function(*arguments)
