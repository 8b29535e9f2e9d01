"""Choice between the two schedules by the time of a step: ``accumulation_schedule = "auto"``.

Both give the same bits, so that each may be tried in a training. The first four steps alternate,
the first of each warms up, and the faster one stays. Ranks add up their times, so all choose the
same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch

from zero_core.comm.control import ControlGroup

_log = logging.getLogger(__name__)

_TRIED = (True, False, True, False)
"""Whether each of the first steps is vertical."""
_NUM_WARM_UP = 2


class ScheduleChoice:
    """Tries both schedules, and says which one the next step uses.

    Attributes:
        is_vertical: whether it is the vertical one.
    """

    def __init__(self, control: ControlGroup, device: torch.device) -> None:
        self.is_vertical = _TRIED[0]
        self._control = control
        self._device = device
        self._num_steps = 0
        self._seconds = [0.0, 0.0]  # horizontal, vertical

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time one step, while schedules are tried. Every rank must enter it."""
        if self._num_steps == len(_TRIED):
            yield
            return
        self._synchronize()
        began = perf_counter()
        yield
        if self._num_steps == len(_TRIED):  # by `refuse`
            return
        self._synchronize()
        if self._num_steps >= _NUM_WARM_UP:
            self._seconds[self.is_vertical] = perf_counter() - began
        self._num_steps += 1
        if self._num_steps < len(_TRIED):
            self.is_vertical = _TRIED[self._num_steps]
        else:
            self._choose()

    def refuse(self, why: str) -> None:
        """Stay with the horizontal schedule, as the vertical one cannot be used."""
        _log.warning("accumulation_schedule: auto chose horizontal: %s", why)
        self.is_vertical = False
        self._num_steps = len(_TRIED)

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _choose(self) -> None:
        sums = torch.tensor(self._seconds, dtype=torch.float64, device=self._device)
        horizontal, vertical = (self._control.sum(sums) / self._control.world_size).tolist()
        self.is_vertical = vertical < horizontal
        if self._control.rank == 0:
            _log.info(
                "accumulation_schedule: auto chose %s: a step took %.3g s vertically, %.3g s "
                "horizontally",
                "vertical" if self.is_vertical else "horizontal",
                vertical,
                horizontal,
            )
