"""Trainings that Ctrl-C leaves at a chosen moment, and that continue as the messages say."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import zero_core
from zero_core.engine import Engine
from zero_core.testing.models import batch, make_model

NUM_STEPS = 3
_LEFT_STEP = 1


@dataclass
class Interruption:
    """An interruption at a call of a function of some packages, on this thread."""

    moment: int  # number of that call, from 1 on. 0: none
    is_signal: bool  # whether SIGINT is sent, and not KeyboardInterrupt raised in the function
    packages: Sequence[str]  # names of the packages whose calls count
    num_calls: int = 0  # calls so far

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Count calls in this context, and interrupt it at the moment."""
        sys.setprofile(self._count)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, arg: Any) -> None:
        module = str(frame.f_globals.get("__name__"))
        if event != "call" or module.partition(".")[0] not in self.packages:
            return
        self.num_calls += 1
        if self.num_calls == self.moment:
            sys.setprofile(None)
            if not self.is_signal:
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGINT)


def _step(engine: Engine, inputs: Mapping[str, Any]) -> None:
    engine.backward(engine(**inputs)["loss"])
    engine.step()


def _train_left(
    config: Mapping[str, Any], folder: Path, interruption: Interruption, *, drops: bool
) -> tuple[dict[str, Tensor], list[str]]:
    """Train, be interrupted, and run the same lines again, as often as the engine says.

    ``drops``: whether gradients are dropped before. Returns the final values and what was told.
    """
    warnings: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = warnings.append  # type: ignore[assignment]
    logger = logging.getLogger("zero_core")
    logger.addHandler(handler)
    engine, told = zero_core.build(make_model(), config), []
    try:
        _step(engine, batch(0, 0, 0))
        engine.save_checkpoint(folder)
        is_left, cure = False, ""
        for _ in range(6):
            try:
                if "build the engine again" in cure:
                    engine = zero_core.build(make_model(), config)
                if "checkpoint" in cure:
                    engine.load_checkpoint(folder)
                elif is_left and drops:
                    engine.zero_grad()
                # The cell of a notebook: all steps that are left.
                while engine.global_steps < NUM_STEPS:
                    inputs = batch(engine.global_steps, 0, 0)
                    is_due = not is_left and engine.global_steps == _LEFT_STEP
                    with interruption.armed() if is_due else nullcontext():
                        _step(engine, inputs)
                break
            except KeyboardInterrupt:
                is_left = True
            except Exception as error:
                cure = str(error)
                told.append(cure)
                if not any(way in cure for way in ("checkpoint", "run the forward")):
                    raise
        assert engine.global_steps == NUM_STEPS, told
        told += [text for r in warnings if "zero_grad()" in (text := r.getMessage())]
        return engine.full_state_dict(), told
    finally:
        logger.removeHandler(handler)
        engine.close()


def check_left_anywhere(
    config: Mapping[str, Any],
    folder: Path,
    num_moments: int,
    packages: Sequence[str] = ("zero_core",),
) -> None:
    """Leave forward, backward and step of one rank at random moments, and train on.

    In turns by KeyboardInterrupt in the middle of everything and by SIGINT, and in turns with
    gradients dropped after it and without. The values are those of a training that was not
    interrupted, or, where nothing was dropped, a warning has named the call that drops them.
    """
    never = Interruption(0, is_signal=False, packages=packages)
    expected, told = _train_left(config, folder, never, drops=False)
    assert not told, told
    moments = random.Random(0).sample(range(1, never.num_calls + 1), num_moments)
    for number, moment in enumerate(moments):
        left = Interruption(moment, is_signal=number % 2 == 1, packages=packages)
        drops = number % 4 >= 2
        found, told = _train_left(config, folder, left, drops=drops)
        is_same = all(torch.equal(expected[name], value) for name, value in found.items())
        assert is_same or (told and not drops), (left, told)
        if left.is_signal:
            assert not any("step() was left" in text for text in told), (left, told)
