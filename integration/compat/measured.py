"""Runs a program and measures it: ``measured.py PROGRAM ARGUMENTS``.

``PROGRAM`` is a file or a module's name. Each rank writes a JSON file into the folder
COMPAT_RESULTS: the name of the module imported as deepspeed, losses and seconds of the optimizer
steps, and the growth of memory after the imports. A Trainer's steps are recorded by a callback. A
training loop records its own steps:

    with measured.step() as step:
        ...
        step.loss = loss
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate.state
import deepspeed
import lightning.pytorch.strategies.deepspeed as of_lightning
import torch
import transformers

from benchmarks.harness.memory import peak_bytes, resident_bytes, restart_peak
from zero_engine.script.hook import mend_accelerate, mend_lightning

SEED = 42


LOSSES: list[float] = []
STEP_SECONDS: list[float] = []


@contextmanager
def step() -> Iterator[SimpleNamespace]:
    """Time one optimizer step. The training loop sets ``loss`` of the yielded object."""
    begun, one = time.perf_counter(), SimpleNamespace(loss=float("nan"))
    yield one
    LOSSES.append(float(one.loss))  # waits for the device, as per-step logging does
    STEP_SECONDS.append(time.perf_counter() - begun)


class Steps(transformers.TrainerCallback):
    """Records a Trainer's steps and the losses that it logs."""

    def __init__(self) -> None:
        self._begun = 0.0

    def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
        self._begun = time.perf_counter()

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        STEP_SECONDS.append(time.perf_counter() - self._begun)

    def on_log(self, *args: Any, logs: dict[str, float], **_kwargs: Any) -> None:
        compared = os.environ["COMPAT_COMPARED"]
        if compared in logs:
            LOSSES.append(float(logs[compared]))


def allow_cpu() -> None:
    """Lift the limits that libraries impose on CPUs."""
    # The Trainer requires a GPU before it passes bf16 to deepspeed.
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
    # `zero-engine run` calls these functions itself. Without `mend_accelerate`, DeepSpeed on a CPU
    # trains every rank separately.
    if deepspeed.__name__ == "deepspeed":
        mend_accelerate(accelerate.state)
        mend_lightning(of_lightning)


@contextmanager
def measuring() -> Iterator[None]:
    """Measure the enclosed code on this rank and write the result."""
    before = resident_bytes()
    restart_peak()
    yield
    found = {
        "deepspeed": deepspeed.__name__,
        "losses": LOSSES,
        "step_seconds": STEP_SECONDS,
        "peak_bytes": peak_bytes() - before,
    }
    file = Path(os.environ["COMPAT_RESULTS"], f"rank{os.environ['RANK']}.json")
    file.write_text(json.dumps(found), encoding="utf-8")


def run(program: str) -> None:
    make = transformers.Trainer.__init__

    def make_with_callback(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.add_callback(Steps())

    transformers.Trainer.__init__ = make_with_callback  # type: ignore[method-assign]
    del sys.argv[0]
    if program.endswith(".py"):
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def main() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    allow_cpu()
    transformers.set_seed(SEED)  # TRL before 1.15 makes adapters before it sets its seed
    with measuring() if "RANK" in os.environ else nullcontext():
        run(sys.argv[1])


if __name__ == "__main__":
    # Programs import this file as `measured`, so its state must be in the module of that name.
    importlib.import_module("measured").main()
