"""Limits of the process that reads foreign files: no network, bounded memory and time."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from pathlib import Path

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_SPARE_BYTES = 4 << 30
"""Memory beside the mapped files: one parameter at a time, and what Python and torch need."""
_SPARE_SECONDS = 120
_SECONDS_PER_GB = 60
"""Processor time: each byte is summed twice and copied once, which takes a few seconds per GB."""
_MAX_LIMIT = 1 << 62
_MAX_TEXT = 4000
MAX_ANSWER_BYTES = 64 << 10


def leave_network() -> bool:
    """Move this process into a network namespace of its own, which has no interface that is up.

    Threads that exist keep the network: call it before any is started. Without privileges it
    takes a user namespace, which some systems refuse.

    Returns:
        Whether the system permitted it.
    """
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    return any(unshare(flags) == 0 for flags in (_CLONE_NEWNET, _CLONE_NEWUSER | _CLONE_NEWNET))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies. ``parent`` is its number."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before
        os.kill(os.getpid(), signal.SIGKILL)


def limit_memory(mapped_bytes: int) -> None:
    """Limit this process's address space to its present size, ``mapped_bytes`` and a margin.

    ``mapped_bytes`` is the size of the files to be mapped. A file that takes more memory causes a
    MemoryError. No core is dumped.
    """
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = min(pages * os.sysconf("SC_PAGE_SIZE") + mapped_bytes + _SPARE_BYTES, _MAX_LIMIT)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower(resource.RLIMIT_AS, limit)


def limit_processor_time(read_bytes: int, spare_s: int = _SPARE_SECONDS) -> None:
    """Limit this process's processor time to a generous bound for reading ``read_bytes``.

    Reading a pickle of a few bytes can take for ever, for instance a dict key of nested tuples,
    whose hash visits each path. The process is ended by SIGXCPU.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + spare_s
    seconds += read_bytes * _SECONDS_PER_GB // 10**9
    _lower(resource.RLIMIT_CPU, seconds)


def _lower(kind: int, limit: int) -> None:
    """Set a soft limit, within the hard one."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def printable(text: str) -> str:
    """Return a text for a terminal: cut, names from a file without escape sequences."""
    cut = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ..."
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in cut
    )
