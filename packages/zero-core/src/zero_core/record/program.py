"""Samples of the program outside of the engine: the lines that its time goes to."""

from __future__ import annotations

import linecache
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

from zero_core.watch.place import OUTSIDE, Place

INTERVAL_S = 0.01
"""Seconds between two samples. One takes some 20 microseconds of another thread."""
_MAX_DEPTH, _MAX_TEXT, _MAX_LINES = 40, 100, 4
_LIBRARIES = (sys.base_prefix, "<", str(Path(__file__).parents[1]))
_Line = tuple[str, int, str, str]
"""File, line, function, and the function of a package that the line has called."""


class ProgramSampler:
    """Sampler of the stack of one thread while that is outside of the engine.

    A daemon thread, from its construction to `close`. It holds nothing but the place.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._thread = threading.get_ident()
        self._package = _package_of_program()
        self._found: Counter[_Line] = Counter()
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._watcher = threading.Thread(target=self._run, name="zero_core samples", daemon=True)
        self._watcher.start()

    def take(self) -> dict[str, float]:
        """Return seconds by line since the last call, the most first."""
        with self._lock:
            found, self._found = self._found, Counter()
        return {_describe(line): n * INTERVAL_S for line, n in found.most_common(_MAX_LINES)}

    @property
    def has_samples(self) -> bool:
        """Whether `take` would return any."""
        return bool(self._found)

    def close(self) -> None:
        """End, and wait for the sample under way."""
        self._end.set()
        if threading.current_thread() is not self._watcher:  # the garbage collector runs anywhere
            self._watcher.join()

    def _run(self) -> None:
        while not self._end.wait(INTERVAL_S):
            if self._place.doing == OUTSIDE:
                self._sample()

    def _sample(self) -> None:
        # No frame outlives this call: it would keep tensors of the program, and free them here.
        frame = sys._current_frames().get(self._thread)
        if frame is not None:
            with self._lock:
                self._found[_locate(frame, self._package)] += 1


def _package_of_program() -> str | None:
    """Return the package whose module ``python -m`` runs: the program may itself be installed."""
    spec = sys.modules["__main__"].__spec__
    return None if spec is None else spec.name.partition(".")[0]


def _locate(frame: FrameType, package: str | None) -> _Line:
    """Return the innermost line of the program, and what it calls.

    The program is ``package`` and all that is in no installed package.
    """
    found: FrameType | None = frame
    called = ""
    for _ in range(_MAX_DEPTH):
        if found is None:
            break
        code = found.f_code
        module = found.f_globals.get("__name__", "")
        if "site-packages" in code.co_filename:
            is_program = module.partition(".")[0] == package
        else:
            is_program = not code.co_filename.startswith(_LIBRARIES)
        if is_program:
            return code.co_filename, found.f_lineno, code.co_qualname, called
        called = f"{module}.{code.co_qualname}"
        found = found.f_back
    return "", 0, "", called


def _describe(line: _Line) -> str:
    """Return, as an example, "train.py:12 (main): print(loss.item())"."""
    path, number, function, called = line
    if not path:
        return called
    text = linecache.getline(path, number).strip()[:_MAX_TEXT]
    within = f" [in {called}]" if called else ""
    return f"{Path(path).name}:{number} ({function}): {text}{within}"
