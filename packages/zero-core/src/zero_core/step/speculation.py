"""Whether units are updated in backward before the step is decided.

[Note: speculation]
With clipping, fp16's loss scale or ``check_grad_overflow`` the last gradient of backward decides on
the step. The state tier may begin it all the same, as if it were taken without clipping, and undo
it where that turns out wrong (`zero_core.protocols.SpeculativeTier`). No number depends on it.

An update that is undone costs the host two copies of its states and the update itself again, and
one that is kept costs it a copy. By default it is therefore measured whether it pays. Where most of
the last steps were clipped or skipped, units are updated after the decision, until few are. Else
`TRIAL` steps are timed, in turns with and without speculation, and the faster way stays. Each rank
goes by its own clock: ranks wait for each other in every step, and may differ without a difference
to anybody.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from time import perf_counter

from zero_core.config import Config
from zero_core.errors import ConfigError
from zero_core.protocols import SpeculativeTier, StateTier

_log = logging.getLogger(__name__)

WINDOW = 16
"""Steps that count."""
MOST_UNDONE, FEW_UNDONE = 0.5, 0.25
"""Fractions of these: above the first speculation ends, up to the second it begins again."""
TRIAL, TURN = 32, 8
"""Steps that are timed, and how many of them are alike in a row."""


def updates_in_backward(config: Config) -> bool:
    """Whether units are updated in backward for good, as configured.

    By default: with optimizer offload and no clipping, fp16 or overflow check. Nor with
    ``memory_checkpoint``, which reads the states beside backward.
    """
    offload = config.zero_optimization.offload_optimizer
    if config.can_cancel_steps:
        return False
    if offload.update_in_backward is not None:
        return offload.update_in_backward
    return offload.device != "none" and config.memory_checkpoint is None


def may_speculate(config: Config) -> bool:
    """Whether units are updated in backward such that it can be undone, as configured.

    By default: with a size of the undo log, and without ``memory_checkpoint``.
    """
    offload = config.zero_optimization.offload_optimizer
    if offload.device != "cpu" or not config.can_cancel_steps:
        return False
    if offload.update_in_backward is not None:
        return offload.update_in_backward
    return offload.undo_buffer_size is not None and config.memory_checkpoint is None


class Speculation:
    """Decides from step to step. See [Note: speculation].

    Attributes:
        tier: the state tier, where it is to begin steps; else None.
        is_on: whether it is to begin the next one.
    """

    def __init__(self, config: Config, tier: StateTier, *, rank: int) -> None:
        """Prepare the tier.

        Raises:
            ConfigError: it is demanded, and the tier cannot undo updates.
        """
        offload = config.zero_optimization.offload_optimizer
        self.tier: SpeculativeTier | None = None
        self._is_demanded = bool(offload.update_in_backward)
        self._is_logging = rank == 0
        self._undone: deque[bool] = deque(maxlen=WINDOW)
        if may_speculate(config):
            if isinstance(tier, SpeculativeTier) and tier.enable_undo():
                self.tier = tier
                self._log_choice(
                    "in backward, with %d bytes of undo log on a rank", tier.undo_bytes
                )
            elif self._is_demanded:
                raise ConfigError(
                    "zero_optimization.offload_optimizer.update_in_backward needs updates that can "
                    "be undone, as gradient_clipping, fp16 or check_grad_overflow may change or "
                    "cancel a step: those of Adam, AdamW, Adagrad, SGD or Lion by cpu-adam's "
                    "kernel (pip install zero-offload[cpu-adam]). Found another optimizer, no "
                    "kernel or another tier: leave the key out"
                )
            else:
                self._log_choice("after backward: no kernel of this optimizer can be undone")
        self.is_on = self.tier is not None
        self._is_rare = True  # few of the last steps were undone
        self._pays = True  # until it is measured
        self._trial: _Trial | None = _Trial()

    def note(self, *, is_undone: bool) -> None:
        """Note whether a step was decided otherwise than speculation takes it to be."""
        self._undone.append(is_undone)
        if self.tier is None or self._is_demanded or len(self._undone) < WINDOW:
            return
        was_on = self.is_on
        self._count_undone()
        if self._is_rare and self._trial is not None:
            self._compare_times(self._trial, was_on=was_on)

    def _count_undone(self) -> None:
        fraction = sum(self._undone) / WINDOW
        if self._is_rare and fraction > MOST_UNDONE:
            self._is_rare = False
            if self._trial is not None:
                self._trial.pause()
            if self._pays:
                self.is_on = False
                self._log_choice(
                    "after backward from now on: %d%% of steps were undone", 100 * fraction
                )
        elif not self._is_rare and fraction <= FEW_UNDONE:
            self._is_rare = True
            if self._pays:
                self.is_on = True
                self._log_choice(
                    "in backward from now on: %d%% of steps were clipped", 100 * fraction
                )

    def _compare_times(self, trial: _Trial, *, was_on: bool) -> None:
        self.is_on = trial.note(is_on=was_on)
        if not trial.is_over:
            return
        early_s, late_s = trial.medians()
        self.is_on = self._pays = early_s <= late_s
        self._trial = None
        self._log_choice(
            ("in backward" if self._pays else "after backward")
            + " from now on: a step took %.3g s with updates in backward, %.3g s after it",
            early_s,
            late_s,
        )

    def _log_choice(self, text: str, *values: float) -> None:
        if self._is_logging:
            _log.info("offloaded units are updated " + text, *values)


class _Trial:
    """Times of `TRIAL` steps, in turns with and without speculation. See [Note: speculation].

    A step is timed from one decision to the next. It has what the host left over of the step
    before, so it counts only where that was like it.

    Attributes:
        is_over: whether all steps were timed.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._num_steps = 0
        self._last: tuple[bool, float] | None = None
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    def note(self, *, is_on: bool) -> bool:
        """Note that a step is decided. Return whether the next one is to be begun before it is."""
        now = perf_counter()
        if self._last is not None and self._last[0] == is_on:
            self._seconds[is_on].append(now - self._last[1])
        self._last = is_on, now
        self._num_steps += 1
        self.is_over = self._num_steps == TRIAL
        return self._num_steps // TURN % 2 == 0

    def pause(self) -> None:
        """Exclude the next step from timing: untimed steps precede it."""
        self._last = None

    def medians(self) -> tuple[float, float]:
        """Return the seconds of a step with speculation and without."""
        return statistics.median(self._seconds[True]), statistics.median(self._seconds[False])
