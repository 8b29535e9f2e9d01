"""Training that is killed at random moments, and what it ends with.

``nox -s soak -- --minutes 20 --seed 1``. A run has a stage, a share of its optimizer states on the
host and an interval between checkpoints; each of its launches has a number of ranks. All are drawn
from the seed, and so are what happens to a launch and when. A run that came to its end is compared
with one that nothing happened to, on one rank: every byte of the weights. Ends with code 1 if a
byte differs, a launch hangs, or a process stays.
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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import faults_page
from faults.harness import END_S, Program, is_running
from zero_engine.train.metrics import read_metrics
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
LEAVE_WITHIN_S = 60.0
"""How long ranks may take to save and leave when their launcher is gone."""
KILLED_RANK = "SIGKILL of a rank"
PAUSED = "SIGSTOP and SIGCONT of a rank"
FAULTS = (
    KILLED_RANK,
    "SIGKILL of a rank, without a restart",
    "SIGKILL of the launcher",
    "SIGKILL of all",
    "SIGTERM of the launcher",
    PAUSED,
)


@dataclass(frozen=True)
class Run:
    """What is the same in all launches of a run."""

    stage: int
    offload: float
    save_every: int

    def config(self) -> dict[str, Any]:
        """Return the engine's configuration: four micro-batches per step on any ranks."""
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


class Soak:
    """Runs in a folder, and counts of what came of them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder, seed
        self._straight: dict[tuple[int, float], bytes] = {}
        self.faults: Counter[str] = Counter()
        self.counts = Counter(dict.fromkeys(("runs", "launches", "differing bits"), 0))
        self.counts.update(dict.fromkeys(("hangs", "processes left", "failed launches"), 0))

    def run(self) -> None:
        """Let a run be killed several times, come to its end, and compare it."""
        # Of its own: a run before may end at an earlier launch another time.
        draw = random.Random(f"{self._seed} {self.counts['runs']}")
        stage = draw.randrange(4)
        run = Run(stage, draw.choice(OFFLOADS) if stage else 0.0, draw.choice((1, 3, 10, 25)))
        folder = RunFolder(self._folder / f"run-{self.counts['runs']}")
        faults = [draw.choice(FAULTS) for _ in range(draw.randint(1, MOST_KILLS))]
        print(f"run {self.counts['runs']}: {run}, {len(faults)} faults", flush=True)
        for fault in faults:
            if self._launch(run, folder, fault, draw) == 0:
                break  # the moment came too late
        else:
            self._launch(run, folder, None, draw)
        found, wanted = weights(folder), self._straight_weights(run)
        differing = sum((a ^ b).bit_count() for a, b in zip(found, wanted, strict=True))
        self.counts["runs"] += 1
        self.counts["differing bits"] += differing
        print(f"  {differing} of {8 * len(wanted):,} bits differ", flush=True)

    def _straight_weights(self, run: Run) -> bytes:
        """Return the weights of a run that nothing happens to."""
        key = (run.stage, run.offload)
        if key not in self._straight:
            folder = RunFolder(self._folder / f"straight-{run.stage}-{run.offload}")
            with Program(*command(Run(*key, STEPS), folder, 1, 0)) as program:
                assert program.end() == 0, program.output
            self._straight[key] = weights(folder)
        return self._straight[key]

    def _launch(self, run: Run, folder: RunFolder, fault: str | None, draw: random.Random) -> int:
        """Start the run or go on with it, let something happen, and wait. Return the exit code."""
        num_ranks = draw.choice(RANKS)
        is_early, after_s = draw.random() < 0.3, draw.uniform(0, LONGEST_START_S)
        num_steps, victim, share = draw.randint(1, MOST_STEPS), draw.randrange(4), draw.random()
        restarts = 1 if fault == KILLED_RANK else 0
        self.counts["launches"] += 1
        began, first = time.monotonic(), last_step(folder)
        with Program(*command(run, folder, num_ranks, restarts)) as program:
            ranks: list[int] = []
            if fault and has_ranks(program):
                limit = time.monotonic() + (after_s if is_early else END_S)
                while time.monotonic() < limit and not program.has_ended:
                    if not is_early and last_step(folder) >= first + num_steps:
                        time.sleep(share * LONGEST_DELAY_S)
                        break
                    time.sleep(0.01)
                ranks = [] if program.has_ended else program.ranks()
            step = last_step(folder)
            if fault and ranks:
                self._strike(program, ranks, victim, fault, share * LONGEST_PAUSE_S)
            code = self._end(program)
            self._wait_for(ranks)
            took = time.monotonic() - began
            said = f"{fault} at step {step}" if ranks else "nothing happens"
            print(f"  {num_ranks} ranks: {said}; code {code} after {took:.0f} s", flush=True)
            if code and fault in (None, KILLED_RANK, PAUSED):
                self.counts["failed launches"] += 1
                print(program.output, flush=True)
        return code

    def _strike(
        self, program: Program, ranks: list[int], victim: int, fault: str, pause_s: float
    ) -> None:
        self.faults[fault] += 1
        one = ranks[victim % len(ranks)]
        with suppress(ProcessLookupError):
            if fault == PAUSED:
                os.kill(one, signal.SIGSTOP)
                time.sleep(pause_s)
                os.kill(one, signal.SIGCONT)
            elif fault.startswith(KILLED_RANK):
                os.kill(one, signal.SIGKILL)
            elif fault == "SIGKILL of the launcher":
                program.kill()
            elif fault == "SIGKILL of all":
                program.kill_all()
            else:
                os.kill(program.pid, signal.SIGTERM)

    def _end(self, program: Program) -> int:
        try:
            return program.end()
        except subprocess.TimeoutExpired:
            self.counts["hangs"] += 1
            print(program.output, flush=True)
            return -1

    def _wait_for(self, ranks: list[int]) -> None:
        """Wait until no rank runs that was there when something happened."""
        limit = time.monotonic() + LEAVE_WITHIN_S
        while any(map(is_running, ranks)) and time.monotonic() < limit:
            time.sleep(0.05)
        for pid in filter(is_running, ranks):
            self.counts["processes left"] += 1
            os.kill(pid, signal.SIGKILL)


def command(run: Run, folder: RunFolder, num_ranks: int, restarts: int) -> tuple[str, ...]:
    """Return what starts a run, or goes on with it."""
    config = folder.root.with_suffix(".json")
    config.write_text(json.dumps(run.config()))
    return (
        *("-m", "zero_engine", "train", *OPTIONS, f"--config={config}", f"--output={folder.root}"),
        *(f"--save-every={run.save_every}", f"--ranks={num_ranks}", "--resume=auto"),
        f"--max-restarts={restarts}",
    )


def has_ranks(program: Program) -> bool:
    """Wait until there are ranks, and return False if there never are."""
    while not program.has_ended:
        if program.ranks():
            return True
        time.sleep(0.05)
    return False


def last_step(folder: RunFolder) -> int:
    """Return the last step that the log of a run holds."""
    if not folder.metrics.exists():
        return 0
    return max((int(entry["step"]) for entry in read_metrics(folder.metrics)), default=0)


def weights(folder: RunFolder) -> bytes:
    return (folder.hf / "model.safetensors").read_bytes()


def main(arguments: Mapping[str, Any]) -> int:
    """Soak for some minutes and say what was counted."""
    seed, minutes = arguments["seed"], arguments["minutes"]
    print(f"seed {seed}: {minutes:g} minutes", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), seed)
        while time.monotonic() - began < 60 * minutes:
            soak.run()
    took = (time.monotonic() - began) / 60
    found = {"seed": seed, "minutes": round(took, 1), **soak.counts, "faults": dict(soak.faults)}
    print(json.dumps(found, indent=1))
    if arguments["write"]:
        faults_page.write("soak", found)
    wrong = ("differing bits", "hangs", "processes left", "failed launches")
    return int(any(soak.counts[name] for name in wrong))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--write", action="store_true", help="write the counts to docs/faults.md")
    sys.exit(main(vars(parser.parse_args())))
