"""Calls into the C library and the OpenMP runtime."""

from __future__ import annotations

import ctypes
import sys

import torch


def release_free_pages() -> None:
    """Make glibc return freed memory to the operating system. Does nothing with other C libraries.

    glibc retains freed blocks below 32 MiB that have small live objects next to them. After a
    model's parameters have moved to the engine's memory, a third of the model's size may be such.
    """
    _call("malloc_trim", 0)


def use_one_core() -> None:
    """Let the calling thread run its torch operations without an OpenMP team of further threads.

    OpenMP gives each calling thread a separate team of threads, which spin while they wait. Next to
    the training thread's team, a second team can make operations ten times slower.
    """
    torch.get_num_threads()  # a thread's first torch call sets the limit anew
    _call("omp_set_num_threads", 1)


def _call(name: str, *arguments: int) -> None:
    """Call the C function ``name`` if a library loaded in this process has it."""
    if sys.platform == "linux":
        # foreign: musl has no malloc_trim, and OpenMP is optional
        function = getattr(ctypes.CDLL(None), name, None)
        if function is not None:
            function(*arguments)
