"""All contenders over all links, in rounds: who runs when, and what is kept of it.

Every **round** runs every contender once, in freshly started processes, one contender at a time,
through all rates. So slow moments of the machine fall on all of them.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import zero_core
from zero_engine.bench.comm.contenders import BARE, NEEDS, PEERS, has_meaning, zero_config
from zero_engine.bench.comm.job import Job
from zero_engine.bench.comm.link import NODES, Link
from zero_engine.bench.comm.link_rate import measure_link, measure_node
from zero_engine.bench.comm.report import BARS, Found, rows_of, table_of, write_plot
from zero_engine.bench.measured import missing
from zero_engine.bench.processes import CPU_ALONE, RankError, own_environment, run_together
from zero_engine.machine import processor_name

__all__ = ["compare"]

PORT = 29500
PAGE_WIDTH = 132
BITS = 8
LINK_SECONDS = 1.0
"""How long a plain transfer over the link is timed."""
NODE_NBYTES = 512 * 2**20
"""Of the plain transfer within a node."""


@dataclass
class _Contender:
    """One contender over all rounds of a job."""

    name: str
    failure: str = ""
    """Why there are no numbers."""
    rounds: list[list[list[dict[str, Any]]]] = field(default_factory=list)
    """By round, rank, and rate: what `zero_engine.bench.comm.rank` found."""


def compare(jobs: Sequence[Job], names: Sequence[str], *, rounds: int, output: Path) -> None:
    """Measure the contenders; print the tables, and who failed and why; write JSON and PNG.

    Raises:
        LinkError: no link can be made here.
    """
    console = Console(width=None if sys.stdout.isatty() else PAGE_WIDTH)
    output.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, Any]] = []
    with Link.made() as link:
        links = _measure_links(link, sorted({rate for job in jobs for rate in job.rates}), console)
        for job in jobs:
            contenders = [_Contender(n, missing(n, NEEDS)) for n in names if has_meaning(n, job)]
            for number in range(rounds):
                for contender in contenders:
                    if not contender.failure:
                        text = f"{job.title}: round {number + 1}/{rounds}: {contender.name}"
                        console.print(text, highlight=False)
                        _run(link, job, contender)
            runs += [_summary(job, contenders, rate) for rate in job.rates]
    report = {
        "rounds": rounds,
        "bars": BARS,
        "machine": {
            "processor": processor_name(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
        },
        "links": links,
        "runs": runs,
    }
    (output / "comm.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    write_plot(runs, output / "comm.png")
    console.print(f"written to {output}", highlight=False)
    for run in runs:
        console.print(table_of(run))
        for name, row in run["contenders"].items():
            if "failure" in row:
                console.print(f"{name}: {row['failure']}", highlight=False, markup=False)


def _measure_links(link: Link, rates: Sequence[int], console: Console) -> list[dict[str, Any]]:
    """What plain TCP reaches at each rate, and within a node while the link is limited so."""
    found = []
    for rate in rates:
        link.limit(rate)
        nbytes = int(rate * 1e6 / BITS * LINK_SECONDS)
        across = [bits / 1e6 * BITS for bits in measure_link(link, nbytes)]
        within = measure_node(link, NODE_NBYTES) / 1e6 * BITS
        found.append({"rate_mbit": rate, "across_mbit": across, "within_mbit": within})
        console.print(
            f"link of {rate} Mbit/s: plain TCP reaches {across[0]:.0f} and {across[1]:.0f} Mbit/s, "
            f"both ways at once; within a node {within:.0f} Mbit/s",
            highlight=False,
        )
    return found


def _run(link: Link, job: Job, contender: _Contender) -> None:
    """One round of one contender: torchrun in both nodes."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        try:
            run_together(
                [_torchrun(link, node, job, contender.name, folder) for node in NODES],
                [_environment(link, node) for node in NODES],
                [folder / f"node{node}.log" for node in NODES],
            )
        except RankError as error:
            link.end_processes()  # torchrun was killed, and its ranks were not
            failures = sorted(folder.glob("*.failure"), key=lambda path: path.stat().st_mtime_ns)
            said = failures[0].read_text(encoding="utf-8") if failures else str(error)
            contender.failure = f"failed: {said}"
            print(error.log, file=sys.stderr)
            return
        files = [folder / f"rank{rank}.json" for rank in range(job.world_size)]
        contender.rounds.append([json.loads(file.read_text(encoding="utf-8")) for file in files])


def _torchrun(link: Link, node: int, job: Job, name: str, folder: Path) -> list[str]:
    program = ("zero_engine.bench.comm.rank", name, job.to_json(), link.devices[node], str(folder))
    return link.command(
        node,
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(len(NODES)), "--node-rank", str(node)),
            *("--nproc-per-node", str(job.ranks_per_node)),
            *("--master-addr", link.addresses[0], "--master-port", str(PORT)),
            *("--local-addr", link.addresses[node], "-m", *program),
        ],
    )


def _environment(link: Link, node: int) -> dict[str, str]:
    return {**own_environment(), **CPU_ALONE, "GLOO_SOCKET_IFNAME": link.devices[node]}


def _summary(job: Job, contenders: Sequence[_Contender], rate: int) -> dict[str, Any]:
    """Every contender's figures at ``rate``, for the report."""
    place = job.rates.index(rate)
    found = {}
    for contender in contenders:
        by_rank = [[of_rank[place] for of_rank in ranks] for ranks in contender.rounds]
        found[contender.name] = _found(job, contender, by_rank)
    return {
        "title": job.title,
        "rate_mbit": rate,
        "ranks_per_node": job.ranks_per_node,
        "job": json.loads(job.to_json()),
        "contenders": rows_of(found, rate=rate, bare=BARE, peers=PEERS),
    }


def _found(job: Job, contender: _Contender, rounds: list[list[dict[str, Any]]]) -> Found:
    if contender.failure:
        return Found(failure=contender.failure)
    num_steps = job.steps * len(rounds)
    senders = [node * job.ranks_per_node for node in NODES]
    return Found(
        times_s=[t for ranks in rounds for t in ranks[0]["times_s"]],
        cpu_s=sum(found["cpu_s"] for ranks in rounds for found in ranks) / num_steps,
        sent_bytes=[
            sum(ranks[rank]["sent_bytes"] for ranks in rounds) / num_steps for rank in senders
        ],
        predicted_bytes=_predicted(job, contender.name),
        counted_bytes=[
            _sum_of_node(rounds[-1][first : first + job.ranks_per_node]) for first in senders
        ],
        first_loss=_mean_loss(rounds[0], 0),
        last_loss=_mean_loss(rounds[-1], -1),
    )


def _sum_of_node(ranks: Sequence[dict[str, Any]]) -> int | None:
    counted = [found["counted_bytes"] for found in ranks]
    return None if None in counted else sum(counted)


def _mean_loss(ranks: Sequence[dict[str, Any]], place: int) -> float:
    return statistics.fmean(found["losses"][place] for found in ranks)


def _predicted(job: Job, name: str) -> int | None:
    """Bytes that a node sends to the other one per step, by this engine's plan; None for others."""
    if not name.startswith("zero"):
        return None
    with torch.device("meta"):
        model = job.model()
    plan = zero_core.plan(
        model,
        zero_config(name, job),
        job.world_size,
        ranks_per_node=job.ranks_per_node,
        device_type="cpu",
    )
    return job.ranks_per_node * sum(kind.between_nodes_bytes for kind in plan.traffic)
