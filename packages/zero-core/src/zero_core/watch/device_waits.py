"""Collectives that a device waits for, where the host does not.

An event is recorded behind each collective, on the stream that waits for it. The events of a CUDA
graph that is being captured cannot be queried: nothing is noted then. During a capture in mode
"global" no other thread may query any event: see docs/clusters.md.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

import torch

_log = logging.getLogger(__name__)

_NUM_WATCHED = 1024
"""Collectives that are remembered at once: hosts do not run further ahead."""
_LAST_WAIT_S = 10.0
"""Longest wait of an engine that ends for collectives that are under way."""


class DeviceWaits:
    """Collectives that the streams of one device wait for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._waited: deque[tuple[str, torch.Event]] = deque(maxlen=_NUM_WATCHED)
        self._has_failed = False

    def note(self, name: str) -> None:
        """Note that the current stream waits for the collective ``name``."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        event = torch.accelerator.current_stream(self._device).record_event()
        with self._lock:
            if len(self._waited) % 64 == 0:
                self._drop_ended()
            if not self._has_failed:
                self._waited.append((name, event))

    def oldest(self) -> tuple[str, torch.Event] | None:
        """Return the oldest collective that has not ended. Any thread may call it."""
        torch.accelerator.set_device_index(self._device)  # a thread begins on the first one
        with self._lock:
            self._drop_ended()
            return self._waited[0] if self._waited else None

    def close(self) -> None:
        """Return when what was noted has ended, has had its time, or never will end."""
        deadline = time.monotonic() + _LAST_WAIT_S
        while time.monotonic() < deadline:
            with self._lock:
                self._drop_ended()
                if not self._waited:
                    return
            time.sleep(0.01)

    def _drop_ended(self) -> None:
        """Forget what has ended. If the device has failed, log and forget the rest."""
        try:
            while self._waited and self._waited[0][1].query():
                self._waited.popleft()
        except RuntimeError as error:  # every later call to the device raises the same
            _log.error(
                "%s has failed: %s. These collectives may not have ended: %s",
                self._device,
                error,
                "; ".join(name for name, _ in self._waited),
            )
            self._has_failed = True
            self._waited.clear()
