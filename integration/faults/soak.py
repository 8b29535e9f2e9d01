"""Training that is killed at random moments and compared with an undisturbed run.

``nox -s "faults(soak)" -- --minutes 20 --seed 1``. A run has a stage, an offload ratio and an
interval between checkpoints. Each launch of a run has a number of ranks and faults at random
moments. All of these are drawn from the seed. A completed run's weights are compared byte by byte
with those of an undisturbed run on one rank. The exit code is 1 if a bit differs, a launch hangs or
fails by itself, or a process remains.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.harness import END_S, Program, complete, is_running, last_step, ranks_leave, weights
from zero_engine.train.settings import RunFolder

STEPS = 60
OPTIONS = (
    *("--layers=2", "--width=32", "--heads=2", "--context=32", "--vocab=300"),
    *(f"--steps={STEPS}", "--eval-every=60", "--eval-windows=16"),
)
OFFLOADS = (0.0, 0.5, 1.0)
RANKS = (1, 2, 4)
MOST_KILLS, MOST_STEPS = 6, 15
LONGEST_START_S, LONGEST_PAUSE_S, LONGEST_DELAY_S = 8.0, 3.0, 0.2
KILLED_RANK = "SIGKILL of a rank"
LOST_RANK = "SIGKILL of a rank, without a restart"
PAUSED = "SIGSTOP and SIGCONT of a rank"
OUTLIVED = (KILLED_RANK, PAUSED)
"""Faults that a launch survives."""
WRONG = ("differing bits", "hangs", "processes left", "failed launches")
FAULTS = (
    KILLED_RANK,
    LOST_RANK,
    "SIGKILL of the launcher",
    "SIGKILL of all",
    "SIGTERM of the launcher",
    PAUSED,
)


@dataclass(frozen=True)
class Run:
    """Settings shared by all launches of a run."""

    stage: int
    offload: float
    save_every: int

    def config(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage}
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu", "ratio": self.offload}
        return {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            "world_size_invariant": True,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "gradient_clipping": 1.0,
            "zero_optimization": zero,
        }


@dataclass(frozen=True)
class Moment:
    """Moment of a fault, and the affected rank."""

    is_early: bool
    after_s: float
    num_steps: int
    victim: int
    share: float

    @classmethod
    def drawn(cls, draw: random.Random) -> Moment:
        """Draw a moment early in the ranks' life, or after some steps."""
        is_early, after_s = draw.random() < 0.3, draw.uniform(0, LONGEST_START_S)
        return cls(is_early, after_s, draw.randint(1, MOST_STEPS), draw.randrange(4), draw.random())

    def wait(self, program: Program, folder: RunFolder, gone: list[int]) -> list[int]:
        """Wait for the moment. Return the ranks, or an empty list if the program has ended.

        ``gone`` are killed ranks, whose replacements must start first. Raises TimeoutError if
        training makes no progress.
        """
        while not program.has_ended and (not program.ranks() or set(program.ranks()) & set(gone)):
            time.sleep(0.05)
        first = last_step(folder)
        limit = time.monotonic() + (self.after_s if self.is_early else END_S)
        while time.monotonic() < limit and not program.has_ended:
            if not self.is_early and last_step(folder) >= first + self.num_steps:
                time.sleep(self.share * LONGEST_DELAY_S)
                break
            time.sleep(0.01)
        else:
            if not self.is_early and not program.has_ended:
                raise TimeoutError(f"no {self.num_steps} steps in {END_S:.0f} s")
        return [] if program.has_ended else program.ranks()


class Soak:
    """Runs in a folder, and counts of their results."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder, seed
        self._straight: dict[tuple[int, float], bytes] = {}
        self.faults: Counter[str] = Counter()
        self.counts = Counter(dict.fromkeys(("runs", "launches", *WRONG), 0))

    def run(self) -> None:
        """Start a run, kill it several times, let it complete, and compare its weights."""
        # A generator per run, because the number of launches of the previous run can vary.
        draw = random.Random(f"{self._seed} {self.counts['runs']}")
        stage = draw.randrange(4)
        run = Run(stage, draw.choice(OFFLOADS) if stage else 0.0, draw.choice((1, 3, 10, 25)))
        folder = RunFolder(self._folder / f"run-{self.counts['runs']}")
        faults = [draw.choice(FAULTS) for _ in range(draw.randint(1, MOST_KILLS))]
        print(f"run {self.counts['runs']}: {run}, {len(faults)} faults", flush=True)
        for own in launches(faults):  # the last launch has no fault that ends it
            code = self._launch(run, folder, own, draw)
            if code == 0:
                break  # the run completed before all faults
        self.counts["runs"] += 1
        if code:
            return  # the failure is already counted
        found, wanted = weights(folder), self._straight_weights(run)
        differing = sum((a ^ b).bit_count() for a, b in zip(found, wanted, strict=True))
        self.counts["differing bits"] += differing
        print(f"  {differing} of {8 * len(wanted):,} bits differ", flush=True)

    def _straight_weights(self, run: Run) -> bytes:
        key = (run.stage, run.offload)
        if key not in self._straight:
            folder = RunFolder(self._folder / f"straight-{run.stage}-{run.offload}")
            complete(*command(Run(*key, STEPS), folder, 1, 0))
            self._straight[key] = weights(folder)
        return self._straight[key]

    def _launch(self, run: Run, folder: RunFolder, faults: list[str], draw: random.Random) -> int:
        """Start or resume the run and inject ``faults``. Return the exit code."""
        num_ranks = draw.choice(RANKS)
        moments = [Moment.drawn(draw) for _ in faults]
        self.counts["launches"] += 1
        began, last = time.monotonic(), "nothing"
        with Program(*command(run, folder, num_ranks, faults.count(KILLED_RANK))) as program:
            print(f"  {num_ranks} ranks", flush=True)
            ranks: list[int] = []
            try:
                for fault, moment in zip(faults, moments, strict=True):
                    ranks = moment.wait(program, folder, gone=ranks if last == KILLED_RANK else [])
                    if not ranks:
                        break
                    print(f"    {fault} at step {last_step(folder)}", flush=True)
                    self._strike(program, ranks, fault, moment)
                    last = fault
                code = program.end()
            except (TimeoutError, subprocess.TimeoutExpired) as error:
                self.counts["hangs"] += 1
                print(f"{error}\n{program.output}", flush=True)
                return 1
            ranks_leave(ranks)
            for pid in filter(is_running, ranks):
                self.counts["processes left"] += 1
                os.kill(pid, signal.SIGKILL)
            print(f"    code {code} after {time.monotonic() - began:.0f} s", flush=True)
            if code and last in ("nothing", *OUTLIVED):
                self.counts["failed launches"] += 1
                print(program.output, flush=True)
        return code

    def _strike(self, program: Program, ranks: list[int], fault: str, moment: Moment) -> None:
        self.faults[fault] += 1
        one = ranks[moment.victim % len(ranks)]
        with suppress(ProcessLookupError):
            if fault == PAUSED:
                os.kill(one, signal.SIGSTOP)
                time.sleep(moment.share * LONGEST_PAUSE_S)
                os.kill(one, signal.SIGCONT)
            elif fault in (KILLED_RANK, LOST_RANK):
                os.kill(one, signal.SIGKILL)
            elif fault == "SIGKILL of the launcher":
                program.kill()
            elif fault == "SIGKILL of all":
                program.kill_all()
            else:
                os.kill(program.pid, signal.SIGTERM)


def command(run: Run, folder: RunFolder, num_ranks: int, restarts: int) -> tuple[str, ...]:
    config = folder.root.with_suffix(".json")
    config.write_text(json.dumps(run.config()))
    return (
        *("-m", "zero_engine", "train", *OPTIONS, f"--config={config}", f"--output={folder.root}"),
        *(f"--save-every={run.save_every}", f"--ranks={num_ranks}", "--resume=auto"),
        f"--max-restarts={restarts}",
    )


def launches(faults: list[str]) -> Iterator[list[str]]:
    """Yield the faults of each launch. All lists but the last end with a fault that ends it."""
    own: list[str] = []
    for fault in faults:
        own.append(fault)
        if fault not in OUTLIVED:
            yield own
            own = []
    yield own


def main(seed: int, minutes: float) -> int:
    print(f"seed {seed}: {minutes:g} minutes", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), seed)
        while time.monotonic() - began < 60 * minutes:
            soak.run()
    took = (time.monotonic() - began) / 60
    found = {"seed": seed, "minutes": round(took, 1), **soak.counts, "faults": dict(soak.faults)}
    print(json.dumps(found, indent=1))
    return int(any(soak.counts[name] for name in WRONG))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    sys.exit(main(**vars(parser.parse_args())))
