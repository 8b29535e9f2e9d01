"""Predicted and measured time and memory of a step, and the plan's choice against a search.

[Note: cases]
held-out   24 configurations that nothing was fitted to: stage, dtype, offload, ranks, model, link
tuning     other configurations, for improving the prediction
search     6 held-out configurations. Every choice of the plan is measured. Then the plan's best
           choice and the fastest ones are measured again in turn and compared

The rates are those of ``zero-engine doctor --measure``, measured first. With "2 nodes" each rank is
in its own network namespace, and a rate-limited veth pair joins the namespaces
(`benchmarks.experiments.comm.link`, needs root). The rates of that link are measured by the same
program in the same namespaces.

time      median step time over the predicted time. All ranks begin a step together. Each case and
          choice is measured in ``--rounds`` rounds, minutes apart. The fastest round counts,
          because other work on the machine can only add time
memory    peak resident memory of a rank over the planned bytes, in a separate run with glibc's
          ``MALLOC_MMAP_THRESHOLD_`` at 64 KiB, as in `benchmarks.experiments.memory`
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.experiments.comm.link import NODES, Link, missing_for_link
from benchmarks.experiments.memory import RETURN_FREED
from benchmarks.harness import options
from benchmarks.harness.job import Job
from benchmarks.harness.options import RESULTS, Output, of
from benchmarks.harness.ranks import HERE, Node, Place, RankError, Row, Runner, run_ranks
from benchmarks.harness.report import MS, Column, Section, bars, judged, machine, publish
from benchmarks.harness.rounds import start_ranks
from lab.experiments.plan.cases import AGAIN, SETS, Case
from zero_engine.calibration.machine import measure_machine, read_calibration
from zero_engine.calibration.rank import Stopwatch, merged, time_exchanges
from zero_engine.planning import Calibration, Rates, TimedChoice, TimedPlan, plan
from zero_engine.planning.search import whole

RATE_MBIT = 500
"""Rate of the link between the nodes."""
TIME_BAR, WORST_TIME_BAR, NUM_WITHIN = 0.10, 0.20, 20
MEMORY_BAR, WORST_MEMORY_BAR = 0.05, 0.08
CHOICE_BAR, PLAN_BAR_S = 0.05, 30.0
NUM_FINALISTS, FINAL_ROUNDS, HOPELESS = 3, 9, 1.5
"""Parameters of `search`."""


@dataclass(frozen=True)
class Bench:
    """Settings of all cases: steps, rates, and the nodes of a link, if there is one."""

    steps: int
    warmup: int
    runner: Runner
    calibration: Calibration
    linked: Calibration | None
    nodes: Sequence[Node]

    def nodes_of(self, case: Case) -> Sequence[Node]:
        return self.nodes if case.has_link else (HERE,)

    def plan(self, case: Case) -> tuple[TimedPlan, float]:
        """Return the plan and how many seconds planning took."""
        started_at = time.perf_counter()
        job = case.job
        size = (job.micro_batch, job.shape.context)
        ids = torch.zeros(size, dtype=torch.int64, device="meta")
        found = plan(
            job.meta_model(),
            job.config(),
            job.ranks,
            example_inputs=[ids],
            device_type="cpu",
            ranks_per_node=1 if case.has_link else job.ranks,
            calibration=self.linked if case.has_link else self.calibration,
        )
        return found, time.perf_counter() - started_at

    def step_s(self, case: Case) -> float:
        """Return the median seconds of an optimizer step.

        Raises:
            RankError: the ranks failed.
        """
        micro_steps = int(case.job.top.get("gradient_accumulation_steps", 1))
        job = replace(case.job, steps=self.steps * micro_steps, warmup=self.warmup * micro_steps)
        arguments = {"job": job}
        target = "benchmarks.harness.train:on_cpu"
        row = start_ranks(target, arguments, job, self.runner, self.nodes_of(case))
        if "ranks" not in row:
            raise RankError(str(row.get("failure", row)), str(row.get("log", "")))
        times: list[float] = row["ranks"][0]["times_s"]
        groups = zip(*[iter(times)] * micro_steps, strict=True)
        return float(statistics.median(sum(group) for group in groups))

    def peak_bytes(self, case: Case) -> float:
        """Return the largest growth of a rank's resident memory."""
        micro_steps = int(case.job.top.get("gradient_accumulation_steps", 1))
        job = replace(case.job, steps=2 * micro_steps)
        rows = run_ranks(
            "benchmarks.experiments.memory:measure",
            {"job": job, "marks": []},
            job.ranks,
            environment={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **RETURN_FREED},
            nodes=self.nodes_of(case),
        )
        return max(float(row["peak_bytes"]) for row in rows)


def compared(bench: Bench, case: Case, step_s: float) -> Row:
    """Return a case's predicted and measured time and memory."""
    planned, plan_s = bench.plan(case)
    assert planned.step_time is not None, "there are inputs and a calibration"
    predicted_s = planned.step_time.total_s
    use = planned.memory
    planned_bytes = use.device_bytes + use.host_bytes
    peak = bench.peak_bytes(case)
    time_ratio, memory_ratio = step_s / predicted_s, peak / planned_bytes
    return {
        "predicted_s": predicted_s,
        "step_s": step_s,
        "time_ratio": time_ratio,
        "is_time_met": abs(predicted_s / step_s - 1) <= TIME_BAR,
        "planned_bytes": planned_bytes,
        "peak_bytes": peak,
        "memory_ratio": memory_ratio,
        "is_memory_met": abs(memory_ratio - 1) <= MEMORY_BAR,
        "plan_s": plan_s,
        "bound": planned.step_time.bound,
        "lanes": dict(planned.step_time.lanes),
    }


def search(bench: Bench, case: Case, rounds: int) -> Row:
    """Measure every choice of a case's plan, and compare the plan's best choice with the fastest.

    A choice slower than `HOPELESS` times the fastest is not measured in later rounds. Among equally
    fast choices noise decides which one has the least time. Therefore the `NUM_FINALISTS` fastest
    and the plan's best are measured again, in turn, `FINAL_ROUNDS` times. Only these times are
    compared, round by round, because the machine's speed changes more over minutes than choices
    differ.
    """
    planned, plan_s = bench.plan(case)
    best = planned.best
    assert best is not None, "no memory was given"
    choices = {whole(c): c for c in planned.choices if c.is_fitting and not c.placement.is_rounding}
    rows: dict[str, Row] = {}
    for number in range(rounds):
        limit = HOPELESS * min((row["step_s"] for row in rows.values()), default=math.inf)
        for name, choice in choices.items():
            assert choice.step_time is not None, "there are inputs and a calibration"
            predicted_s = choice.step_time.total_s
            row = rows.setdefault(name, {"predicted_s": predicted_s, "step_s": math.inf})
            if number and row["step_s"] > limit:
                continue
            row["step_s"] = min(row["step_s"], _choice_s(bench, case, choice))
            found = f"{predicted_s:.4f} s, measured {row['step_s']:.4f} s"
            print(f"  round {number + 1}: {name}: {found}", flush=True)
    order = sorted(rows, key=lambda name: float(rows[name]["step_s"]))
    finalists = list(dict.fromkeys([whole(best), *order[:NUM_FINALISTS]]))
    times: dict[str, list[float]] = {name: [] for name in finalists}
    for number in range(FINAL_ROUNDS):
        # Every other round is in reverse order, so that no choice always runs after the same one.
        for name in finalists[:: -1 if number % 2 else 1]:
            times[name].append(_choice_s(bench, case, choices[name]))
    over = {name: _median_ratio(times[whole(best)], times[name]) for name in finalists}
    for name in finalists:
        rows[name] |= {"final_s": statistics.median(times[name]), "chosen_over": over[name]}
        print(f"  final: {name}: {rows[name]['final_s']:.4f} s, {over[name]:.3f}", flush=True)
    fastest = max(over, key=lambda name: over[name])
    return {
        "chosen": whole(best),
        "fastest": fastest,
        "over_best": over[fastest],
        "is_met": over[fastest] <= 1 + CHOICE_BAR,
        "plan_s": plan_s,
        "choices": rows,
    }


def _median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Return the median ratio of times measured in turn, paired by round."""
    return statistics.median(mine / other for mine, other in zip(times, others, strict=True))


def _choice_s(bench: Bench, case: Case, choice: TimedChoice) -> float:
    return bench.step_s(replace(case, job=_job_of(case.job, choice)))


def _job_of(job: Job, choice: TimedChoice) -> Job:
    """Return the job with a choice's configuration. The samples per step stay the same."""
    written = choice.apply(job.config())
    again = AGAIN if choice.is_recomputed else {}
    zero = {k: v for k, v in written["zero_optimization"].items() if k != "stage"}
    top = {**again, "gradient_accumulation_steps": choice.micro_steps}
    return replace(job, stage=choice.stage, zero=zero, micro_batch=choice.micro_batch, top=top)


def measure_link(place: Place) -> Row:
    """Measure the rates of collectives between ranks on the link."""
    torch.set_num_threads(1)
    place.join()
    watch = Stopwatch(torch.device("cpu"))
    time_exchanges(watch)
    return {"ranks": len(NODES), "threads": 1, "cores": 1, "curves": watch.curves}


def _over_link(calibration: Calibration, link: Link) -> Calibration:
    """Return the rates of two ranks that are separate nodes on the link."""
    rows = run_ranks(f"{__name__}:measure_link", {}, len(NODES), nodes=link.nodes)
    found = {"format": "zero calibration 1", "device": "", "source": "", "rates": [merged(rows)]}
    own, of_link = calibration.at(len(NODES)), Calibration.from_json(found, "the link's rates")
    cores = None if own.cores is None else max(1, own.cores // len(NODES))
    curves = {**own.curves, **of_link.rates[0].curves}
    return Calibration(calibration.device, "", (Rates(1, own.threads, cores, curves),))


def main(
    sets: Annotated[list[str] | None, of(SETS, "--set")] = None,
    steps: options.Steps = 12,
    warmup: Annotated[int, typer.Option(min=0, help="Untimed steps before them.")] = 3,
    only: Annotated[
        list[str] | None, typer.Option(help="Cases whose name has these words. Repeatable.")
    ] = None,
    rates: Annotated[
        Path | None, typer.Option(help="Rates measured before. Default: they are measured first.")
    ] = None,
    rate: Annotated[int, typer.Option(min=1, help="Mbit/s of the link.")] = RATE_MBIT,
    rounds: options.Rounds = 2,
    output: Output = RESULTS,
) -> None:
    """Measure, write ``plan.json`` and ``plan.png``, print a table per set."""
    os.environ.pop("OMP_NUM_THREADS", None)  # ranks then share the cores
    started_at = time.perf_counter()
    calibration = _rates(rates, output)
    calibration_s = time.perf_counter() - started_at
    chosen = {
        name: [c for c in SETS[name]() if all(word in c.name for word in only or ())]
        for name in sets or SETS
    }
    needs_link = any(case.has_link for cases in chosen.values() for case in cases)
    reason = missing_for_link() if needs_link else ""
    if reason:
        print(f"cases of two nodes are skipped: {reason}")
    parts: dict[str, dict[str, Row]] = {}
    with Link.made() if needs_link and not reason else nullcontext() as link:
        linked = None
        if link is not None:
            link.limit(rate)
            linked = _over_link(calibration, link)
        nodes = () if link is None else link.nodes
        bench = Bench(steps, warmup, Runner(), calibration, linked, nodes)
        for name, cases in chosen.items():
            parts[name] = {}
            served = [case for case in cases if link is not None or not case.has_link]
            for case, row in _rows(bench, name, served, rounds):
                parts[name][case.name] = row
                shown = row.get("time_ratio", row.get("over_best"))
                print(f"{name}: {case.name}: {shown:.3f}", flush=True)
    report = {
        "machine": machine(),
        "rates": {"source": calibration.source, "seconds": calibration_s},
        "rate_mbit": rate,
        "parts": parts,
        "summary": {name: summary(name, rows) for name, rows in parts.items() if rows},
        "seconds": time.perf_counter() - started_at,
    }
    publish(output, "plan", report, [section(n, rows) for n, rows in parts.items() if rows])


def _rows(
    bench: Bench, name: str, cases: Sequence[Case], rounds: int
) -> Iterator[tuple[Case, Row]]:
    if name == "search":
        yield from ((case, search(bench, case, rounds)) for case in cases)
        return
    fastest = dict.fromkeys((case.name for case in cases), math.inf)
    for number, case in itertools.product(range(rounds), cases):
        fastest[case.name] = min(fastest[case.name], bench.step_s(case))
        print(f"round {number + 1}: {case.name}: {fastest[case.name]:.4f} s", flush=True)
    yield from ((case, compared(bench, case, fastest[case.name])) for case in cases)


def _rates(path: Path | None, output: Path) -> Calibration:
    if path is not None:
        return read_calibration(str(path))
    found = measure_machine([1, 2], None)
    output.mkdir(parents=True, exist_ok=True)
    (output / "rates.json").write_text(found.to_json() + "\n", encoding="utf-8")
    return found


def summary(name: str, rows: Mapping[str, Row]) -> Row:
    """Return the figures to which the bars apply."""
    longest = max(row["plan_s"] for row in rows.values())
    if name == "search":
        worst = max(row["over_best"] for row in rows.values())
        return {"worst_over_best": worst, "longest_plan_s": longest}
    errors = [abs(row["predicted_s"] / row["step_s"] - 1) for row in rows.values()]
    memory = [abs(row["memory_ratio"] - 1) for row in rows.values()]
    return {
        "num_within_10_percent": sum(error <= TIME_BAR for error in errors),
        "num_cases": len(errors),
        "worst_time": max(errors),
        "worst_memory": max(memory),
        "longest_plan_s": longest,
    }


def section(name: str, rows: Mapping[str, Row]) -> Section:
    if name == "search":
        over = Column("of fastest", lambda r: judged(r["over_best"], ".3f", r["is_met"]))
        columns = [over, Column("chosen", "chosen"), Column("fastest", "fastest")]
        return Section("the choice and every other", rows, columns, heading="case")
    columns = [
        Column("predicted ms", "predicted_s", ".1f", MS),
        Column("measured ms", "step_s", ".1f", MS),
        Column("ratio", lambda r: judged(r["time_ratio"], ".3f", r["is_time_met"])),
        Column("memory", lambda r: judged(r["memory_ratio"], ".3f", r["is_memory_met"])),
        Column("plan s", "plan_s", ".1f"),
        Column("bound", "bound"),
    ]
    found = summary(name, rows)
    caption = (
        f"time within {TIME_BAR:.0%} in {found['num_within_10_percent']} of {found['num_cases']} "
        f"(bar {NUM_WITHIN} of 24), worst {found['worst_time']:.0%} (bar {WORST_TIME_BAR:.0%}); "
        f"memory worst {found['worst_memory']:.1%} (bars {MEMORY_BAR:.0%}, {WORST_MEMORY_BAR:.0%})"
    )
    title = "measured over predicted time"
    panels = bars(title, rows, {"": "time_ratio"}, "")
    return Section(f"plans: {name}", rows, columns, caption, "case", panels)
