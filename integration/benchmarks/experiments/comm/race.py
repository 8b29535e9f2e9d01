"""Two nodes with a slow link: FSDP2, DeepSpeed, and this engine's ZeRO++. Needs root.

Each node is a Linux network namespace. The nodes reach each other only over a rate-limited veth
pair (`benchmarks.experiments.comm.link`). All contenders communicate in bf16, hold fp32 master
weights and train on the same samples in every step.

[Note: figures]
step        median step time
comm        communication time: step time minus the bare forward and backward of the same run
to peer     communication time of the faster 16-bit peer (FSDP2, DeepSpeed) over this contender's
to plain    communication time over that of this engine's plain stage 3
sent        bytes per step counted at a node's end of the link, in the busier direction
planned     bytes per step by `zero_core.plan`
off         relative difference of the counted bytes from the planned ones
link        sent over the link's rate, the least possible communication time
cpu         CPU seconds of all ranks per step
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from benchmarks.experiments.comm.link import (
    NODES,
    Link,
    LinkError,
    limit_command,
    missing_for_link,
    sent_bytes,
)
from benchmarks.harness import options
from benchmarks.harness.job import (
    FOUR_BITS,
    LOSSLESS,
    LOSSLESS_FOUR_BITS,
    LOSSLESS_WEIGHTS,
    QGZ,
    QWZ,
    Job,
)
from benchmarks.harness.models import GptShape
from benchmarks.harness.options import RESULTS, Output, of, parse_size
from benchmarks.harness.ranks import Place, Row, Runner
from benchmarks.harness.report import MS, Column, Rows, Section, bars, judged, machine, publish
from benchmarks.harness.rounds import has_figures, measured, quotient, race, spread, start_ranks
from benchmarks.harness.sides import SIDES
from benchmarks.harness.train import timed_apart

VOCAB = 512
LINK_SECONDS = 1.0
"""Duration of the plain TCP transfer that measures the link."""
CONTENDERS: Mapping[str, tuple[str, Mapping[str, Any], bool]] = {
    "bare": ("bare", {}, False),
    "fsdp2": ("fsdp2", {}, False),
    "deepspeed-3": ("deepspeed", {}, False),
    "zero-3": ("zero", {}, False),
    "zero-3-qwz": ("zero", QWZ, False),
    "zero-3-hpz": ("zero", {}, True),
    "zero-3-qgz": ("zero", QGZ, False),
    "zero-3-all": ("zero", {**QWZ, **QGZ}, True),
    "zero-3-4bit": ("zero", FOUR_BITS, True),
    "zero-3-lossless-weights": ("zero", LOSSLESS_WEIGHTS, False),
    "zero-3-lossless": ("zero", LOSSLESS, False),
    "zero-3-lossless-4bit": ("zero", LOSSLESS_FOUR_BITS, False),
}
"""Side, further keys of ``zero_optimization`` (stage 3), and whether hpZ shards over a node."""
BITS, MEGA = 8, 1e6
BARE, PLAIN, PEERS = "bare", "zero-3", ("fsdp2", "deepspeed-3")
BARS: Mapping[str, Any] = {
    "rate_mbit": 200,
    "ranks_per_node": 2,
    "to_peer": {"zero-3-all": 3.3, "zero-3-4bit": 4.5},
    "deviation": 0.02,
    "loss": 0.01,
}
"""The bars of ``to_peer`` apply only at this rate and number of ranks per node."""


def main(
    rounds: options.Rounds = 2,
    steps: options.Steps = 3,
    rate: Annotated[
        list[int] | None, typer.Option(min=1, help="Mbit/s of the link; 200 and 1000.")
    ] = None,
    ranks_per_node: Annotated[
        list[int] | None, typer.Option(min=1, help="Ranks of each of the two nodes; 1 and 2.")
    ] = None,
    size: Annotated[str, typer.Option(help="LAYERSxWIDTH of the GPT.")] = "8x384",
    lr: Annotated[float, typer.Option(min=0.0, help="Learning rate; 1e-5: fine-tuning.")] = 3e-4,
    only: Annotated[list[str] | None, of(CONTENDERS, "--only", "--contenders")] = None,
    output: Output = RESULTS,
) -> None:
    shape = parse_size(size, vocab=VOCAB, context=64)
    if reason := missing_for_link():
        print(f"skipped: {reason}")
        return
    jobs = {
        count: jobs_of(only or CONTENDERS, shape, count, steps, lr=lr)
        for count in ranks_per_node or (1, 2)
    }
    try:
        compare(jobs, rate or (200, 1000), rounds=rounds, output=output)
    except LinkError as error:
        print(f"skipped: the system refuses a link of two network namespaces: {error}")


def jobs_of(
    names: Iterable[str], shape: GptShape, ranks_per_node: int, steps: int, *, lr: float
) -> list[Job]:
    jobs = []
    for name in names:
        side, flags, has_hpz = CONTENDERS[name]
        if name == "zero-3-hpz" and ranks_per_node == 1:
            continue
        zero = {**flags, **({"zero_hpz_partition_size": ranks_per_node} if has_hpz else {})}
        job = Job(
            *(name, side, shape, 1, steps, 1),
            dtype="bf16",
            lr=lr,
            stage=3,
            zero=zero,
            ranks=len(NODES) * ranks_per_node,
            is_repeating=True,
        )
        jobs.append(job.unchecked())
    return jobs


def compare(
    jobs_by_count: Mapping[int, Sequence[Job]], rates: Sequence[int], *, rounds: int, output: Path
) -> None:
    runner = Runner()
    runs: list[Row] = []
    with Link.made() as link:

        def run(job: Job, _: int) -> Row:
            arguments = {"job": job, "rates": list(rates)}
            return start_ranks(f"{__name__}:measure", arguments, job, runner, link.nodes)

        links = [_measure_link(link, rate) for rate in sorted(set(rates))]
        for count, jobs in jobs_by_count.items():
            ranks = "1 rank" if count == 1 else f"{count} ranks"
            title = f"{jobs[0].shape.numel / 1e6:.0f} M parameters, 2 nodes of {ranks}"
            print(title)
            found = race(jobs, rounds, run)
            planned: dict[str, int] = {}
            for job in jobs:
                if job.side == "zero":
                    traffic = job.plan(ranks_per_node=count, device_type="cpu").traffic
                    planned[job.name] = count * sum(kind.between_nodes_bytes for kind in traffic)
            names = ("shape", "micro_batch", "steps", "warmup", "lr")
            about = {name: asdict(jobs[0])[name] for name in names}
            about |= {"ranks_per_node": count, "rates": list(rates)}
            for place, rate in enumerate(rates):
                rows = {
                    name: summed_up(by_round, place, count, planned.get(name))
                    for name, by_round in found.items()
                }
                of_rate = {"title": title, "rate_mbit": rate, "ranks_per_node": count}
                runs.append({**of_rate, "job": about, "contenders": rows_of(rows, rate=rate)})
    report = {"rounds": rounds, "bars": BARS, "machine": machine(), "links": links, "runs": runs}
    publish(output, "comm", report, [section(run) for run in runs])


def _measure_link(link: Link, rate: int) -> Row:
    """Return plain TCP's rates between the nodes, in both directions at once."""
    link.limit(rate)
    num_bytes = int(rate * MEGA / BITS * LINK_SECONDS)
    across = [speed / MEGA * BITS for speed in link.plain_rates(num_bytes)]
    print(
        f"link of {rate} Mbit/s: plain TCP reaches {across[0]:.0f} and {across[1]:.0f} Mbit/s, "
        "both ways at once",
        flush=True,
    )
    return {"rate_mbit": rate, "across_mbit": across}


def measure(place: Place, job: Mapping[str, Any], rates: Sequence[int]) -> Row:
    """Train on this rank. Return a row of seconds, losses and sent bytes per rate."""
    what = Job.of(job)
    device = os.environ["GLOO_SOCKET_IFNAME"]
    torch.set_num_threads(1)
    place.join()
    batch = next(what.batches(place.rank))
    side = SIDES[what.side](what, torch.device("cpu"), place)
    losses: list[float] = []
    found = []

    def step() -> None:
        losses.append(float(side.step(batch)))

    for rate in rates:
        dist.barrier()
        if os.environ["LOCAL_RANK"] == "0":
            subprocess.run(limit_command(device, rate), check=True)
        dist.barrier()
        losses.clear()
        for _ in range(what.warmup):
            step()
        dist.barrier()
        sent = sent_bytes(device)
        dist.barrier()  # no rank may send before all ranks have read their counter
        cpu_s = time.process_time()
        times = timed_apart(step, what.steps)
        row: Row = {
            "times_s": times,
            "sent_bytes": sent_bytes(device) - sent,
            "cpu_s": time.process_time() - cpu_s,
            "losses": list(losses),
        }
        found.append(row)
        dist.barrier()  # no rank may continue before all ranks have read their counter
    return {"rates": found}


def summed_up(
    rounds: Sequence[Row], place: int, ranks_per_node: int, planned_bytes: int | None
) -> Row:
    """Combine a contender's rounds at the rate with index ``place``."""
    if not has_figures(rounds[-1]):
        return rounds[-1]
    by_round = [[of_rank["rates"][place] for of_rank in row["ranks"]] for row in rounds]
    num_steps = sum(len(ranks[0]["times_s"]) for ranks in by_round)
    firsts = range(0, len(by_round[0]), ranks_per_node)
    return {
        "times_s": [seconds for ranks in by_round for seconds in ranks[0]["times_s"]],
        "cpu_s": sum(rank["cpu_s"] for ranks in by_round for rank in ranks) / num_steps,
        "sent_bytes": [
            sum(ranks[first]["sent_bytes"] for ranks in by_round) / num_steps for first in firsts
        ],
        "planned_bytes": planned_bytes,
        "first_loss": statistics.fmean(rank["losses"][0] for rank in by_round[0]),
        "last_loss": statistics.fmean(rank["losses"][-1] for rank in by_round[-1]),
    }


def rows_of(found: Rows, *, rate: int) -> dict[str, Row]:
    """Add the figures of [Note: figures] to the rows. Without its reference a figure is None."""
    there = measured(found)
    medians = {name: statistics.median(row["times_s"]) for name, row in there.items()}
    comm = {
        name: None if BARE not in medians or name == BARE else seconds - medians[BARE]
        for name, seconds in medians.items()
    }
    peer_s = min((s for name in PEERS if (s := comm.get(name)) is not None), default=None)
    exact = next((there[name]["last_loss"] for name in (*PEERS, "zero-3") if name in there), None)

    def compared(name: str, row: Row) -> Row:
        planned, sent = row["planned_bytes"], row["sent_bytes"]
        deviations = [num / planned - 1 for num in sent] if planned else []
        is_close = exact is not None and abs(row["last_loss"] - exact) <= BARS["loss"] * exact
        return {
            **spread(row["times_s"]),
            "comm_s": comm[name],
            "to_peer": quotient(peer_s, comm[name]),
            "to_plain": quotient(comm[name], comm.get(PLAIN)),
            **row,
            # Deviation of the direction that differs more.
            "deviation": max(deviations, key=abs, default=None),
            "link_s": max(sent) * BITS / (rate * MEGA),
            "is_loss_close": None if name == BARE or exact is None else is_close,
        }

    return {name: compared(name, row) if name in there else row for name, row in found.items()}


def section(run: Mapping[str, Any]) -> Section:
    rate = run["rate_mbit"]
    rows = {name: {"name": name, **row} for name, row in run["contenders"].items()}
    title = f"{run['title']}, a link of {rate} Mbit/s between them"

    def is_as_planned(row: Row) -> bool | None:
        deviation = row["deviation"]
        # For lossless modes the plan is only an expectation.
        if deviation is None or "lossless" in row["name"]:
            return None
        return bool(abs(deviation) <= BARS["deviation"])

    has_bars = (rate, run["ranks_per_node"]) == (BARS["rate_mbit"], BARS["ranks_per_node"])

    def bar(row: Row) -> str | None:
        least = BARS["to_peer"].get(row["name"]) if has_bars else None
        if least is None or row["to_peer"] is None:
            return None
        return judged(least, "g", row["to_peer"] >= least)

    def loss(row: Row) -> str:
        return f"{row['last_loss']:.4f}{' differs' if row['is_loss_close'] is False else ''}"

    columns = (
        Column("step", "median_s", ".0f", MS),
        Column("min", "min_s", ".0f", MS),
        Column("comm", "comm_s", ".0f", MS),
        Column("to peer", "to_peer", ".2f"),
        Column("bar", bar),
        Column("to plain", "to_plain", ".2f"),
        Column("sent", lambda row: max(row["sent_bytes"]), ".2f", MEGA),
        Column("planned", "planned_bytes", ".2f", MEGA),
        Column("off", "deviation", "+.1%"),
        Column("", is_as_planned),
        Column("link", "link_s", ".0f", MS),
        Column("cpu", "cpu_s", ".0f", MS),
        Column("loss", loss),
    )
    caption = (
        "ms; MB per direction; to peer: times as fast as the faster peer's communication; "
        f"bars: bytes within {BARS['deviation']:.0%} of the plan, losses within "
        f"{BARS['loss']:.0%} of the peer's"
    )
    values = {"median step": "median_s", "its bytes over the link's rate": "link_s"}
    bare_s = measured(rows).get(BARE, {}).get("median_s")
    panels = bars(title, rows, values, "seconds; line: bare forward and backward", bar=bare_s)
    return Section(title, rows, columns, caption, "contender", panels)
