"""End of a rank whose launcher is gone.

torchrun ends the ranks when one of them fails, or when it is asked to stop. If torchrun itself is
killed, nothing ends its ranks: they would train on, beside those that replace them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

_INTERVAL_S = 1.0
GRACE_PERIOD_S = 300
"""Seconds that a rank may take to save before it is killed."""
_watches: list[threading.Thread] = []


def end_with_launcher() -> None:
    """Have this process end when the launcher that started it has, as if asked by SIGTERM.

    A program that handles SIGTERM has `GRACE_PERIOD_S` seconds. Nothing is done in a process that
    torchrun did not start, or that watches already.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or _watches:
        return
    # A daemon: it must not keep the process from ending.
    watch = threading.Thread(
        target=_watch, args=(os.getppid(),), name="zero_engine launcher", daemon=True
    )
    _watches.append(watch)
    watch.start()


def _watch(launcher: int) -> None:
    waiting = threading.Event()  # never set
    while os.getppid() == launcher:
        waiting.wait(_INTERVAL_S)
    print(
        f"rank {os.environ.get('RANK', '0')}: the launcher (process {launcher}) is gone: this rank "
        "ends, too",
        file=sys.stderr,
        flush=True,
    )
    os.kill(os.getpid(), signal.SIGTERM)
    waiting.wait(GRACE_PERIOD_S)
    # It waits for a rank that has ended already, and its signal handler does not run.
    os._exit(128 + signal.SIGTERM)
