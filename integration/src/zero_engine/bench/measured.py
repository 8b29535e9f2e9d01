"""One contender of a benchmark over all rounds: run in fresh processes, and added up."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from zero_engine.bench.contenders import NEEDS
from zero_engine.bench.processes import CPU_ALONE, RankError, run_ranks
from zero_engine.bench.workload import Workload
from zero_engine.metrics import MIB

__all__ = ["Measured", "missing", "run_round"]


@dataclass
class Measured:
    """One contender over all rounds."""

    name: str
    times_s: list[float] = field(default_factory=list)
    """Of every timed step, as rank 0 saw it."""
    added_bytes: list[int] = field(default_factory=list)
    """Highest resident memory of each rank and round, over what it was before the model."""
    counted: dict[str, float] = field(default_factory=dict)
    """What the contender counted itself in all timed steps, summed over ranks and rounds."""
    last_loss: float = float("nan")
    """Mean over ranks; contenders that do the same work agree on it."""
    num_rounds: int = 0
    failure: str = ""
    """Why there are no numbers."""

    @property
    def median_s(self) -> float:
        """Median step time."""
        return statistics.median(self.times_s)

    @property
    def added_mib(self) -> float:
        """Median over rounds and ranks, in MiB."""
        return statistics.median(self.added_bytes) / MIB

    def summary(self) -> dict[str, Any]:
        """Plain builtins for the result file."""
        if self.failure:
            return {"failure": self.failure}
        return {
            "median_s": self.median_s,
            "min_s": min(self.times_s),
            "added_mib_per_rank": self.added_mib,
            "last_loss": self.last_loss,
            "times_s": self.times_s,
            "added_bytes": self.added_bytes,
            "counted": self.counted,
        }


def missing(name: str, needs: Mapping[str, str] = NEEDS) -> str:
    """Why a contender cannot be measured here; empty if it can."""
    needed = needs.get(name)
    if needed is None or importlib.util.find_spec(needed) is not None:
        return ""
    return f"{needed} is not installed: pip install {needed}"


def run_round(
    workload: Workload, result: Measured, environment: Mapping[str, str] | None = None
) -> None:
    """One round of one contender: start its ranks, wait for them, add up what they found."""
    try:
        found = run_ranks(
            "zero_engine.bench.worker",
            [result.name, json.dumps(asdict(workload))],
            workload.ranks,
            {**CPU_ALONE, "OMP_NUM_THREADS": str(workload.threads), **(environment or {})},
        )
    except RankError as error:
        result.failure = f"failed: {error}"
        print(error.log, file=sys.stderr)
        return
    result.num_rounds += 1
    result.times_s += found[0]["times_s"]
    result.added_bytes += [f["peak_bytes"] - f["before_bytes"] for f in found]
    result.last_loss = statistics.fmean(f["losses"][-1] for f in found)
    for name in found[0]["counted"]:
        total = sum(f["counted"][name] for f in found)
        result.counted[name] = result.counted.get(name, 0.0) + total
