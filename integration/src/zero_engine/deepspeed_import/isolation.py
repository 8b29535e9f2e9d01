"""Limits of the process that reads foreign files: no network, and bounded memory."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SPARE_BYTES = 4 << 30
"""Memory beside the mapped files: one parameter at a time, and what Python and torch need."""


def leave_network() -> bool:
    """Move this process into a network namespace of its own, which has no interface that is up.

    Threads that exist keep the network: call it before any is started. Without privileges it
    takes a user namespace, which some systems refuse.

    Returns:
        Whether the system permitted it.
    """
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    return any(unshare(flags) == 0 for flags in (_CLONE_NEWNET, _CLONE_NEWUSER | _CLONE_NEWNET))


def limit_memory(mapped_bytes: int) -> None:
    """Bound this process's address space to what it has, ``mapped_bytes`` of files, and a margin.

    A file that asks for more gets a MemoryError. No core is dumped.
    """
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + mapped_bytes + _SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
