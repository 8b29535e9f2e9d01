"""Peak of a process's resident memory, as the kernel counts it (Linux)."""

from __future__ import annotations

import gc
from pathlib import Path
from threading import Event, Thread
from typing import Any

from zero_core._libc import release_free_pages


class PeakMemory:
    """Context that measures how far this process's resident memory rises above its start."""

    nbytes: int  # the rise, known when the context has ended

    def __enter__(self) -> PeakMemory:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM starts from here
        self._before = _read("VmRSS")
        return self

    def __exit__(self, *error: Any) -> None:
        self.nbytes = _read("VmHWM") - self._before


class OwnPeakMemory:
    """Context that measures how far the memory rises that this process has for itself.

    Unlike `PeakMemory` it leaves out the files that the process maps. It reads every millisecond.
    """

    nbytes: int  # the rise, known when the context has ended

    def __enter__(self) -> OwnPeakMemory:
        gc.collect()  # what is freed meanwhile would make room
        release_free_pages()
        self._before = self._highest = _read_own()
        self._has_ended = Event()
        self._watcher = Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._has_ended.set()
        self._watcher.join()
        self.nbytes = max(self._highest, _read_own()) - self._before

    def _watch(self) -> None:
        while not self._has_ended.wait(0.001):
            self._highest = max(self._highest, _read_own())


def _read_own() -> int:
    return _read("RssAnon") + _read("RssShmem")


def _read(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    (line,) = [line for line in lines if line.startswith(f"{key}:")]
    return int(line.split()[1]) * 1024
