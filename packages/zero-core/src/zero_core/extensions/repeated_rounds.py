"""Warning of a gradient that a program may have added up twice."""

from __future__ import annotations

import logging
import sys
from collections import deque

from zero_core.core.extension import Extension
from zero_core.optim.train_state import TrainState

_log = logging.getLogger(__name__)

_NUM_COMPARED = 3
"""Micro-steps with which the next one is compared."""


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
