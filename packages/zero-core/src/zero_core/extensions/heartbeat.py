"""Heartbeat file, which a cluster's health probe reads."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from zero_core.core.extension import EndedStep, Extension

VARIABLE = "ZERO_HEARTBEAT_FILE"
_INTERVAL_S = 1.0


class HeartbeatFile(Extension):
    """File that the first rank of a node writes after a step, at most once a second.

    In each step all ranks wait for each other, so one file shows whether all ranks of a node run.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._rank = rank
        self._next = 0.0

    @classmethod
    def wanted(cls, rank: int) -> list[HeartbeatFile]:
        """Return the file named by the environment variable `VARIABLE`, on LOCAL_RANK 0 only."""
        path = os.environ.get(VARIABLE)
        return [cls(Path(path), rank)] if path and os.environ.get("LOCAL_RANK", "0") == "0" else []

    def stepped(self, ended: EndedStep) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _INTERVAL_S
        content = {"step": ended.number, "rank": self._rank, "pid": os.getpid()}
        text = json.dumps({**content, "time": time.time()}) + "\n"
        with suppress(OSError):  # the probe reports a missing or old file
            self._path.write_text(text, encoding="utf-8")
