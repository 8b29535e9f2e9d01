"""Runs a script of the Trainer and measures it from outside: ``measured.py SCRIPT ARGUMENTS``.

Each rank writes a JSON file into the folder named by COMPAT_RESULTS: which deepspeed it had, the
seconds of each optimizer step, and how far its memory grew above what the imports take.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import accelerate.state
import deepspeed
import torch
import transformers

from benchmarks.harness.memory import peak_bytes, resident_bytes, restart_peak
from zero_engine.script.accelerate_cpu import mend


class StepTimes(transformers.TrainerCallback):
    """Notes when steps begin and end."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begun = 0.0

    def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
        """The first micro-batch of a step."""
        self._begun = time.perf_counter()

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        """After the optimizer's step."""
        self.seconds.append(time.perf_counter() - self._begun)


def run_measured(script: str, arguments: list[str]) -> dict[str, Any]:
    """Run ``script`` as the main program; what was measured."""
    times = StepTimes()
    make = transformers.Trainer.__init__

    def make_with_callback(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.add_callback(times)

    transformers.Trainer.__init__ = make_with_callback  # type: ignore[method-assign]
    sys.argv = [script, *arguments]
    before = resident_bytes()
    restart_peak()
    runpy.run_path(script, run_name="__main__")
    return {
        "deepspeed": deepspeed.__name__,
        "step_seconds": times.seconds,
        "peak_bytes": peak_bytes() - before,
    }


def main() -> None:
    """Run the script on this rank."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if deepspeed.__name__ == "deepspeed":
        mend(accelerate.state)  # without which DeepSpeed on the CPU trains on each rank alone
    measured = run_measured(sys.argv[1], sys.argv[2:])
    file = Path(os.environ["COMPAT_RESULTS"], f"rank{os.environ['RANK']}.json")
    file.write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
