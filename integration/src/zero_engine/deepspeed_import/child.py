"""Process that reads a checkpoint of DeepSpeed: ``python -m ...child``.

It reads a JSON request from stdin. It prints progress on stderr and one JSON object on stdout,
which is empty or has the error. Its memory and processor time are bounded, it has no network
if the system permits that, and it ends with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_SPARE_BYTES = 4 << 30
"""Allowance for memory besides the mapped files: a parameter, Python and torch."""
_SPARE_SECONDS = 120
_SECONDS_PER_GB = 60
"""Allowance for processor time. Two checksums and a copy take a few seconds per GB."""


def main(request: dict[str, Any]) -> dict[str, Any]:
    """Import the checkpoint that ``request`` describes. Returns {}, or the error."""
    if not leave_network():
        print(
            "note: this system permits no network namespace: files are read with the network there",
            file=sys.stderr,
        )
    die_with_parent(request["parent"])  # leave_network would undo an earlier call
    # Imported here, because torch starts threads, which would keep the network.
    from zero_core.errors import ZeroError
    from zero_engine.deepspeed_import import importing

    place = Path(request["place"])
    try:
        size = importing.size_of(place)
        limit(size)
        print(f"reading {place} ({size / 1e9:.2f} GB)", file=sys.stderr, flush=True)
        source = importing.read_source(place, request["frozen"])
        importing.write_source(
            source, Path(request["output"]), request["tag"], request["optimizer"]
        )
    except ZeroError as error:
        return {"error": importing.printable(str(error)), "kind": type(error).__name__}
    except (OSError, MemoryError) as error:
        return {"error": importing.printable(f"{place}: {error!r}"), "kind": "CheckpointError"}
    except Exception as error:  # a malicious file may raise anything
        text = f"{place} is not as DeepSpeed writes its checkpoints: {type(error).__name__} {error}"
        return {"error": importing.printable(text), "kind": "CheckpointCorruptError"}
    return {}


def leave_network() -> bool:
    """Move this process into its own network namespace, which has no active interface.

    It must be called before threads start, because they would keep the network. Without privileges
    the process also gets its own user namespace. Returns whether the system permits the move.
    """
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    return any(unshare(flags) == 0 for flags in (_CLONE_NEWNET, _CLONE_NEWUSER | _CLONE_NEWNET))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the process ``parent`` dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent has died already
        os.kill(os.getpid(), signal.SIGKILL)


def limit(read_bytes: int, spare_s: int = _SPARE_SECONDS) -> None:
    """Bound this process's memory and processor time so that it can map and copy ``read_bytes``.

    More memory causes a MemoryError, and more time SIGXCPU. A pickle of a few bytes can take
    forever: for instance a dict key of nested tuples, whose hash visits every path. No core is
    dumped.
    """
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    seconds = int(sum(os.times()[:2])) + 1 + spare_s + read_bytes * _SECONDS_PER_GB // 10**9
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for kind, bound in (
        (resource.RLIMIT_AS, pages * resource.getpagesize() + read_bytes + _SPARE_BYTES),
        (resource.RLIMIT_CPU, seconds),
    ):
        _, hard = resource.getrlimit(kind)
        soft = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (soft, hard))


if __name__ == "__main__":
    # Libraries print to stderr from here on, because stdout is for the answer.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    answers.write(json.dumps(main(json.load(sys.stdin))))
    answers.close()
