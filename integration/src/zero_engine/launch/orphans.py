"""End of a rank whose launcher has died.

torchrun ends the ranks if one of them fails or if it gets a signal. If torchrun itself is killed,
its ranks would train on, next to the ranks that replace them.
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
    """Send SIGTERM to this process when the launcher that started it has ended.

    A program that handles SIGTERM has `GRACE_PERIOD_S` seconds. Does nothing without torchrun, or
    if the process watches its launcher already.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or _watches:
        return
    # A daemon thread does not delay the end of the process.
    watch = threading.Thread(
        target=_watch, args=(os.getppid(),), name="zero_engine launcher", daemon=True
    )
    _watches.append(watch)
    watch.start()


def _watch(launcher: int) -> None:
    waiting = threading.Event()  # never set: its timeout is an interruptible sleep
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
    # The main thread hangs in a collective with a rank that has ended, so it cannot handle SIGTERM.
    os._exit(128 + signal.SIGTERM)
