"""Heartbeat file, which a probe of a cluster reads."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "ZERO_HEARTBEAT_FILE"
_INTERVAL_S = 1.0


class HeartbeatFile:
    """File that the first rank of a node writes after a step, at most once a second.

    Its time of change is that of the last step, and its content is JSON. The other ranks of the
    node wait for the first one in each step, so one file stands for all of them.
    """

    def __init__(self) -> None:
        """Take the path from the environment variable `VARIABLE`. Without it nothing is written."""
        is_first = os.environ.get("LOCAL_RANK", "0") == "0"
        self._path = os.environ.get(VARIABLE, "") if is_first else ""
        self._next = 0.0

    def beat(self, step: int, rank: int) -> None:
        """Note that ``rank`` has taken ``step`` steps."""
        now = time.monotonic()
        if not self._path or now < self._next:
            return
        self._next = now + _INTERVAL_S
        content = {"step": step, "rank": rank, "pid": os.getpid(), "time": time.time()}
        with suppress(OSError):  # the probe says that it is missing
            Path(self._path).write_text(json.dumps(content) + "\n", encoding="utf-8")
