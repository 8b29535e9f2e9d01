"""Ctrl-C within a step, which defers it, and between backward and step, where a warning follows."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

from zero_core.core.extension import Extension
from zero_core.optim.train_state import TrainState

_log = logging.getLogger(__name__)

_NUM_COMPARED = 3
"""Micro-steps with which the next one is compared."""


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


class RepeatedRounds(Extension):
    """Warns once of a gradient that two runs of the same lines have added up.

    A round is a backward, outside of ``no_sync``, of a forward that began after the backward before
    it. Several in a micro-step are legal: two losses, each with a forward of its own. So are they
    if the program was interrupted between backward and ``step`` and begins again. The second case
    shows in two ways: there are more rounds than in the micro-steps before, or an interactive
    interpreter has reported an error (``sys.last_value``) since the round before. If it was the
    first micro-step, those after it have fewer.
    """

    def __init__(self, train: TrainState, *, rank: int) -> None:
        self._train = train
        self._rank = rank
        self._num_rounds = 0
        self._before: deque[int] = deque(maxlen=_NUM_COMPARED)  # rounds of micro-steps that ended
        self._is_first_known = False
        self._micro_step = 0
        self._num_drops = 0
        self._reported = 0  # id of the error that was reported last
        self._is_told = False

    def begin_backward(self, *, is_new: bool) -> None:
        if not is_new:
            return
        train = self._train
        micro_step = train.accumulation.micro_steps
        if micro_step > self._micro_step and self._num_rounds:
            self._before.append(self._num_rounds)
            self._look_at_first()
        if (micro_step, train.num_drops) != (self._micro_step, self._num_drops):
            self._num_rounds = 0
        self._micro_step, self._num_drops = micro_step, train.num_drops
        reported, self._reported = self._reported, id(vars(sys).get("last_value"))
        self._num_rounds += 1
        is_after_error = self._num_rounds > 1 and reported != self._reported
        if is_after_error or 0 < max(self._before, default=0) < self._num_rounds:
            self._tell(
                "backward adds to the gradient of %d that no step() has taken: if the program was "
                "interrupted and began again, call engine.zero_grad() and run forward and backward "
                "again, or the step is too long",
                self._num_rounds - 1,
            )

    def _look_at_first(self) -> None:
        if self._is_first_known or len(self._before) < _NUM_COMPARED:
            return
        self._is_first_known = True
        first, *others = self._before
        if first > max(others):
            self._tell(
                "the first micro-step added up %d backwards, those after it fewer: if the program "
                "was interrupted and began again there, its step was too long. Build the engine "
                "again from the first weights. engine.zero_grad() drops a gradient",
                first,
            )

    def _tell(self, text: str, number: int) -> None:
        if not self._is_told:
            self._is_told = True
            place = (self._rank, self._train.global_steps + 1)
            _log.warning("rank %d, step %d: " + text + ". This is said once", *place, number)
