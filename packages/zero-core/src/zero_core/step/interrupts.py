"""Ctrl-C within a step, which defers it. See `zero_core.extensions.guards` for others."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class DeferredInterrupt:
    """Context in which SIGINT waits for the end. The handler that was there is called then.

    A second SIGINT passes at once, with the first. Outside of the main thread, or where no Python
    function handles SIGINT, nothing is deferred.
    """

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._is_waiting = False

    def __enter__(self) -> None:
        if self._is_on and threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._defer)

    def _defer(self, signum: int, frame: FrameType | None) -> None:
        if not self._is_waiting:
            self._is_waiting = True
            return
        handler, self._handler = self._handler, None
        assert handler is not None, "it is called within the context alone"
        signal.signal(signal.SIGINT, handler)
        handler(signum, frame)
        handler(signum, frame)

    def __exit__(self, *error: object) -> None:
        handler = self._handler
        if handler is None:
            return
        found = signal.signal(signal.SIGINT, handler)
        if found != self._defer:  # code within the step has set another one
            signal.signal(signal.SIGINT, found)
        if self._is_waiting:
            handler(signal.SIGINT, sys._getframe(1))
