"""Injected failures: an exception in a chosen call, or Ctrl-C at a chosen moment of a training.

After an interruption, tests continue the training as the engine's error messages advise.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import zero_core
from zero_core.testing.models import make_model
from zero_core.testing.training import train_steps

NUM_STEPS = 3
_LEFT_STEP = 1


class Failure(Exception):
    """Injected error."""


Call = tuple[str, int]
"""A function's name, and the index of one of its calls, from 0."""
_ONE_AT_A_TIME = threading.Lock()
"""Python refuses to set a thread's profile function while another thread sets its own."""


@contextmanager
def failing(call: Call | None, event: str, file: str | None) -> Iterator[list[Call]]:
    """Make one call from the frames of ``file`` raise `Failure`, at its start or its end.

    ``event`` is "call" for the start and "return" for the end. With ``call`` None, nothing fails.
    Yields the list of calls so far. Only Python functions that other files define count.
    """
    calls: list[Call] = []

    def trace(frame: FrameType, kind: str, arg: Any) -> None:
        caller = frame.f_back
        is_from_there = caller is not None and caller.f_code.co_filename == file
        if kind == event and is_from_there and frame.f_code.co_filename != file:
            name = frame.f_code.co_qualname
            calls.append((name, sum(name == other for other, _ in calls)))
            if calls[-1] == call:
                raise Failure(call)

    with _ONE_AT_A_TIME:
        sys.setprofile(trace)
    try:
        yield calls
    finally:
        with _ONE_AT_A_TIME:
            sys.setprofile(None)


def described(model: nn.Module, optimizer: torch.optim.Optimizer, *, has_places: bool) -> Any:
    """Return what a plain program can observe of a model and an optimizer, to be compared.

    ``has_places``: include the parameters' addresses.
    """
    modules = [
        {
            key: [repr(item) for item in value.items()] if isinstance(value, dict) else repr(value)
            for key, value in vars(module).items()
            if key not in ("_parameters", "_buffers", "_modules")
        }
        for module in model.modules()
    ]
    params = [
        (
            name,
            id(param),
            type(param),
            param.requires_grad,
            param.device,
            param.stride(),
            sorted(vars(param)),
            None if param.is_meta else _bits(param),
            param.data_ptr() if has_places and not param.is_meta else None,
            None if param.grad is None else (id(param.grad), _bits(param.grad)),
            len(param._backward_hooks or ()),
            len(param._post_accumulate_grad_hooks or ()),
        )
        for name, param in model.named_parameters(remove_duplicate=False)
    ]
    buffers = [(name, id(b), None if b.is_meta else _bits(b)) for name, b in model.named_buffers()]
    groups = [{**group, "params": [*map(id, group["params"])]} for group in optimizer.param_groups]
    given = {key: repr(value) for key, value in vars(optimizer).items() if key != "param_groups"}
    return modules, params, buffers, groups, given


def _bits(tensor: Tensor) -> bytes:
    own = tensor.detach().clone(memory_format=torch.contiguous_format)
    return own.view(-1).view(torch.uint8).numpy().tobytes()


@dataclass
class Interruption:
    """An interruption of this thread at a call of a function in ``packages``."""

    moment: int  # number of the interrupted call, from 1; 0: none
    is_signal: bool  # send SIGINT instead of raising KeyboardInterrupt in the function
    packages: Sequence[str]
    num_calls: int = 0  # calls counted so far

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Count calls within this context and interrupt the chosen call."""
        sys.setprofile(self._count)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, arg: Any) -> None:
        module = str(frame.f_globals.get("__name__"))
        if event != "call" or module.partition(".")[0] not in self.packages:
            return
        if frame.f_code.co_name == "<genexpr>":  # may run in a finalizer, which ignores exceptions
            return
        self.num_calls += 1
        if self.num_calls == self.moment:
            sys.setprofile(None)
            if not self.is_signal:
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGINT)


def _train_left(
    config: Mapping[str, Any], folder: Path, interruption: Interruption, *, drops: bool
) -> tuple[dict[str, Tensor], list[str]]:
    """Train with an interruption, and follow the engine's advice until the training ends.

    ``drops``: call ``zero_grad`` after the interruption. Returns the final values, all error
    messages, and the warnings that name ``zero_grad()``.
    """
    warnings: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = warnings.append  # type: ignore[assignment]
    logger = logging.getLogger("zero_core")
    logger.addHandler(handler)
    engine, told = zero_core.build(make_model(), config), []
    try:
        train_steps(engine, 0, 1)
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
                # like a notebook cell that is run again: train all remaining steps
                while engine.global_steps < NUM_STEPS:
                    step = engine.global_steps
                    is_due = not is_left and step == _LEFT_STEP
                    with interruption.armed() if is_due else nullcontext():
                        train_steps(engine, step, step + 1)
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
    """Interrupt training steps of one rank at random moments, and continue the training.

    Alternates between KeyboardInterrupt and SIGINT, and between dropping and keeping gradients. The
    final values must equal those of an uninterrupted training. If gradients are not dropped, an
    error or a warning that names ``zero_grad()`` is also accepted.
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
