"""Training on a simulated accelerator with random delays, bit-identical to the CPU's results.

The cases are the engine at stages 0 to 3, with offload of optimizer states and parameters and with
ZeRO++, and an offloaded optimizer in a plain loop. Ranks are threads with a device each
(`packages/zero-core/tests/support/fake_cuda`). A run's number determines its case, ranks and
delays. Only failures are recorded.

[Note: oracles]
The oracle is the same program on CPU ranks. With AdamW and a ratio between 0 and 1, a device
updates its part with torch's kernel and the host with cpu-adam's, which differ by ulps. CPU ranks
use cpu-adam's kernel for both parts. Cases with such ratios therefore use Adamax, which torch
updates on host and device.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from support import fake_cuda
from support.fake_cuda.simulated import simulate_on_devices
from torch import Tensor, nn, optim

import zero_core
from benchmarks.harness.options import RESULTS, Output, of
from benchmarks.harness.ranks import Row
from benchmarks.harness.report import Column, Section, judged, publish
from zero_core.comm.groups import Ranks
from zero_core.testing import make_model, run_alone, seeded, simulate, train_unread
from zero_offload import OffloadedOptimizer

STEPS = 4
TIMEOUT_S = 60.0
RUNS_PER_PROCESS = 50
DELAYS_S = (0.0, 1e-5, 1e-4, 5e-4)
"""Choices of a kernel's longest delay. A copy's longest delay is ten times as long."""

Result = tuple[list[float], dict[str, Tensor]]


@dataclass(frozen=True)
class Training:
    """A training of the engine.

    Attributes:
        zero: keys of ``zero_optimization``.
        world_sizes: numbers of ranks to choose from.
        dtype: "fp32" or "bf16".
        accumulation: micro-steps per step.
        clipping: largest gradient norm; 0 disables clipping.
        optimizer: name of the optimizer.
        is_checked: whether steps with non-finite gradients are skipped.
        ranks_per_node: number of ranks per node; None for all ranks.
        file: keys of ``offload_param``, for parameters in a file.
        top: further keys of the configuration.
    """

    zero: Mapping[str, Any] = field(default_factory=dict)
    world_sizes: Sequence[int] = (1, 2, 3)
    dtype: str = "bf16"
    accumulation: int = 1
    clipping: float = 0.0
    optimizer: str = "AdamW"
    is_checked: bool = True
    ranks_per_node: int | None = None
    file: Mapping[str, Any] | None = None
    top: Mapping[str, Any] = field(default_factory=dict)

    def config(self, folder: str) -> dict[str, Any]:
        """Return the engine's configuration. Parameter files are written to ``folder``."""
        params = {"lr": 1e-2, "weight_decay": 0.1}
        low = {"enabled": self.dtype == "bf16"}
        if self.dtype == "bf16":
            low["check_grad_overflow"] = self.is_checked
        zero = dict(self.zero)
        if self.file is not None:
            zero["offload_param"] = {"device": "nvme", "nvme_path": folder, **self.file}
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "bf16": low,
            "optimizer": {"type": self.optimizer, "params": params},
            "zero_optimization": zero,
            **self.top,
        }

    def run(self, ranks: Ranks, folder: str) -> Result:
        engine = zero_core.build(make_model(), self.config(folder), process_group=ranks)
        return train_unread(engine, ranks.rank, steps=STEPS, accumulation=self.accumulation)


@dataclass(frozen=True)
class Loop:
    """A plain training loop of one rank with `OffloadedOptimizer`."""

    ratio: float
    world_sizes: Sequence[int] = (1,)
    ranks_per_node: int | None = None

    def run(self, ranks: Ranks, folder: str) -> Result:
        """Train. ``folder`` is not used."""
        with seeded(0):
            model = nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.Linear(65, 7))
            data = torch.randn(STEPS, 5, 33)
        model.to(ranks.device)
        kind: Any = optim.Adamax if 0 < self.ratio < 1 else optim.AdamW
        optimizer = OffloadedOptimizer(kind, model.parameters(), lr=1e-2, ratio=self.ratio)
        losses = []
        for rows in data:
            optimizer.zero_grad()
            loss = model(rows.to(ranks.device)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        values = {name: value.cpu() for name, value in model.state_dict().items()}
        return [loss.item() for loss in losses], values


def _host(ratio: float, **keys: Any) -> dict[str, Any]:
    return {"offload_optimizer": {"device": "cpu", "ratio": ratio, "pin_memory": True, **keys}}


_ALL_PARAMS = {"stage3_param_persistence_threshold": 0}
_PARAMS = {"offload_param": {"device": "cpu", "pin_memory": True}, **_ALL_PARAMS}
_EARLY = {"update_in_backward": True}
_NODES: dict[str, Any] = {"world_sizes": (4,), "ranks_per_node": 2}
_PLUS_PLUS = {
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
    "zero_hpz_partition_size": 2,
}
CASES: Mapping[str, Training | Loop] = {
    **{
        f"stage {stage}, {dtype}": Training(
            {"stage": stage}, dtype=dtype, accumulation=number, clipping=clipping
        )
        for stage in range(4)
        for dtype, number, clipping in (("fp32", 1, 0.0), ("bf16", 2, 0.5))
    },
    "Muon": Training({"stage": 3}, optimizer="Muon"),
    "recomputed": Training({"stage": 3}, top={"activation_checkpointing": {}}),
    "recomputed from host": Training(
        {"stage": 3}, top={"activation_checkpointing": {"cpu_checkpointing": True}}
    ),
    "host, stage 1": Training({"stage": 1, **_host(1.0)}, dtype="fp32"),
    "host, stage 3, accumulated": Training({"stage": 3, **_host(1.0)}, accumulation=3),
    "twin, stage 2": Training(
        {"stage": 2, **_host(0.6)}, optimizer="Adamax", accumulation=2, clipping=0.5
    ),
    "twin, stage 3": Training({"stage": 3, **_host(0.6)}, optimizer="Adamax"),
    "host, in backward": Training({"stage": 3, **_host(1.0, **_EARLY)}, is_checked=False),
    "twin, in backward": Training(
        {"stage": 2, **_host(0.6, **_EARLY)}, optimizer="Adamax", is_checked=False
    ),
    # More micro-steps than the host keeps separately, so their gradients are summed on the host.
    "host, folded in backward": Training(
        {"stage": 3, **_host(1.0, **_EARLY)}, accumulation=6, is_checked=False
    ),
    "twin, folded": Training(
        {"stage": 2, **_host(0.6)}, optimizer="Adamax", accumulation=6, clipping=0.5
    ),
    "parameters": Training({"stage": 3, **_PARAMS}),
    "parameters and host": Training({"stage": 3, **_PARAMS, **_host(1.0)}, accumulation=2),
    "parameters and twin": Training({"stage": 3, **_PARAMS, **_host(0.6)}, optimizer="Adamax"),
    "parameters in a file": Training(
        {"stage": 3, **_ALL_PARAMS, **_host(1.0)}, file={"max_in_cpu": 0, "buffer_count": 2}
    ),
    "qwZ": Training({"stage": 3, "zero_quantized_weights": True}, world_sizes=(2, 3)),
    "qgZ": Training({"stage": 2, "zero_quantized_gradients": True}, world_sizes=(2, 3)),
    "hpZ": Training({"stage": 3, "zero_hpz_partition_size": 2}, **_NODES),
    "two levels": Training({"stage": 2}, **_NODES),
    "ZeRO++": Training({"stage": 3, **_PLUS_PLUS}, accumulation=2, clipping=0.5, **_NODES),
    "ZeRO++ and host": Training({"stage": 3, **_PLUS_PLUS, **_host(1.0)}, **_NODES),
    "loop, host": Loop(1.0),
    "loop, twin": Loop(0.6),
}


@dataclass(frozen=True)
class Run:
    """A case with its ranks and delays. ``number`` determines all of them."""

    number: int
    case: str
    world_size: int
    delay_s: float

    @classmethod
    def draw(cls, number: int, cases: Sequence[str]) -> Run:
        """Return run ``number``.

        Runs take the cases in order. Ranks and delays are drawn at random.
        """
        drawn = random.Random(number)
        case = cases[number % len(cases)]
        return cls(number, case, drawn.choice(CASES[case].world_sizes), drawn.choice(DELAYS_S))


class Bits:
    """Compares runs on delayed devices with the CPU's results. Needs its own process.

    The CPU's results are cached by case and number of ranks.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._expected: dict[tuple[str, int], list[Result]] = {}

    def difference(self, run: Run) -> str:
        """Return how a run's results differ from those of CPU ranks, or an empty string."""
        case = CASES[run.case]
        key = run.case, run.world_size
        if key not in self._expected:
            self._expected[key] = simulate(
                case.run, run.world_size, self._folder.name, ranks_per_node=case.ranks_per_node
            )
        fake_cuda.set_delays(seed=run.number, kernel_s=run.delay_s, copy_s=10 * run.delay_s)
        try:
            found = simulate_on_devices(
                case.run,
                run.world_size,
                self._folder.name,
                ranks_per_node=case.ranks_per_node,
                timeout_s=TIMEOUT_S,
            )
        except Exception as error:  # any exception is a failure of this run
            return f"{type(error).__name__}: {error}"
        for rank, (ours, theirs) in enumerate(zip(found, self._expected[key], strict=True)):
            if ours[0] != theirs[0]:
                return f"rank {rank}: losses {ours[0]}, on the CPU {theirs[0]}"
            for name, value in theirs[1].items():
                if not torch.equal(ours[1][name], value):
                    return f"rank {rank}: {name} differs"
        return ""


def _run_all(runs: Sequence[Run], file: str) -> None:
    """Take the runs in order. Each row is written at once, because a run may kill this process."""
    bits = Bits()
    with Path(file).open("a") as rows:
        for run in runs:
            began = time.perf_counter()
            failure = bits.difference(run)
            row = {"number": run.number, "case": run.case, "ranks": run.world_size}
            row |= {"delay_s": run.delay_s, "took_s": time.perf_counter() - began}
            print(json.dumps({**row, "failure": failure}), file=rows, flush=True)


def run_rows(runs: Sequence[Run]) -> Iterator[Row]:
    """Run in new processes, each of which takes `RUNS_PER_PROCESS` runs.

    Yield a row per run, with its ``failure`` or "".
    """
    left = list(runs)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows"
            file.touch()
            death = ""
            try:
                run_alone(_run_all, left[:RUNS_PER_PROCESS], str(file))
            except Exception as error:  # the process died in the run after the last written row
                death = f"{type(error).__name__}: {error}"
            done = [json.loads(line) for line in file.read_text().splitlines()]
        yield from done
        left = left[len(done) :]
        if death:
            run = left.pop(0)
            yield {
                "number": run.number,
                "case": run.case,
                "ranks": run.world_size,
                "delay_s": run.delay_s,
                "took_s": 0.0,
                "failure": death,
            }


def main(
    only: Annotated[list[str] | None, of(CASES)] = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs, over the cases in turn.")] = 500,
    first: Annotated[int, typer.Option(min=0, help="Number of the first run.")] = 0,
    output: Output = RESULTS,
) -> None:
    """Run, write ``late.json``, and print the failures by case."""
    cases = list(only or CASES)
    rows = list(run_rows([Run.draw(number, cases) for number in range(first, first + runs)]))
    failures = [row for row in rows if row["failure"]]
    table = {
        case: {
            "runs": sum(row["case"] == case for row in rows),
            "failures": sum(row["case"] == case for row in failures),
        }
        for case in cases
    }
    columns = [
        Column("runs", "runs", "d"),
        Column("failures", lambda row: judged(row["failures"], "d", row["failures"] == 0)),
    ]
    report = {"runs": len(rows), "failures": failures, "cases": table}
    publish(output, "late", report, [Section("the CPU's bits", table, columns, heading="case")])
    for row in failures:
        print(f"run {row['number']}, {row['case']}, {row['ranks']} ranks: {row['failure']}")
