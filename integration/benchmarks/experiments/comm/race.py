"""Two nodes and a slow link between them: FSDP2, DeepSpeed, and this engine's ZeRO++. Root.

Each node is a network namespace of Linux, and a limited veth pair is the only way between them
(`benchmarks.experiments.comm.link`). torchrun starts the ranks of both. Everyone communicates in
bf16 over fp32 master weights, and sees the same samples in every step.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

import zero_core
from benchmarks.experiments.comm.link import NODES, Link, LinkError, missing_for_link
from benchmarks.experiments.comm.link_rate import measure_link, measure_node
from benchmarks.experiments.comm.rows import BARS, rows_of, save_picture, summed_up, table
from benchmarks.harness.job import Job
from benchmarks.harness.models import GptShape
from benchmarks.harness.options import RESULTS, Context, Output, Rounds, Steps, choose, parse_size
from benchmarks.harness.ranks import (
    CPU_ALONE,
    RankError,
    Row,
    own_environment,
    program,
    run_together,
    write_json,
)
from benchmarks.harness.report import machine, make_console, reasons
from benchmarks.harness.rounds import Say, take_turns

PORT = 29500
BITS = 8
VOCAB = 512
LINK_SECONDS = 1.0
"""Length of a plain transfer over the link."""
NODE_NBYTES = 512 * 2**20
"""Of the plain transfer within a node."""
_QWZ = {"zero_quantized_weights": True}
_QGZ = {"zero_quantized_gradients": True}
_FOUR_BITS = {
    **_QWZ,
    "zero_quantized_weights_format": "int4_difference",
    **_QGZ,
    "zero_quantized_gradients_within_node": "int8",
    "zero_quantized_gradients_between_nodes": "int4",
    "zero_quantized_gradients_hadamard": True,
}
CONTENDERS: Mapping[str, tuple[str, Mapping[str, Any], bool]] = {
    "bare": ("bare", {}, False),
    "fsdp2": ("fsdp2", {}, False),
    "deepspeed-3": ("deepspeed", {}, False),
    "zero-3": ("zero", {}, False),
    "zero-3-qwz": ("zero", _QWZ, False),
    "zero-3-hpz": ("zero", {}, True),
    "zero-3-qgz": ("zero", _QGZ, False),
    "zero-3-all": ("zero", {**_QWZ, **_QGZ}, True),
    "zero-3-4bit": ("zero", _FOUR_BITS, True),
}
"""Side, keys of ``zero_optimization`` besides stage 3, and whether hpZ is over a node."""


def main(
    rounds: Rounds = 2,
    steps: Steps = 3,
    warmup: Annotated[int, typer.Option(min=0, help="Untimed steps before them.")] = 1,
    rate: Annotated[
        list[int] | None, typer.Option(min=1, help="Mbit/s of the link; 200 and 1000.")
    ] = None,
    ranks_per_node: Annotated[
        list[int] | None, typer.Option(min=1, help="Ranks of each of the two nodes; 1 and 2.")
    ] = None,
    size: Annotated[str, typer.Option(help="LAYERSxWIDTH of the GPT.")] = "8x384",
    context: Context = 64,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", "--contenders", help=f"Contenders, of: {', '.join(CONTENDERS)}."),
    ] = None,
    output: Output = RESULTS,
) -> None:
    """Measure, print the tables, and write ``comm.json`` and ``comm.png``."""
    names = choose(only, CONTENDERS, "contender", "--only")
    shape = parse_size(size, vocab=VOCAB, context=context)
    reason = missing_for_link()
    try:
        if not reason:
            compare(
                {
                    count: jobs_of(names, shape, count, steps, warmup)
                    for count in ranks_per_node or (1, 2)
                },
                rate or (200, 1000),
                rounds=rounds,
                output=output,
            )
    except LinkError as error:
        reason = f"the system refuses a link of two network namespaces: {error}"
    if reason:
        print(f"skipped: {reason}")


def jobs_of(
    names: Iterable[str], shape: GptShape, ranks_per_node: int, steps: int, warmup: int
) -> list[Job]:
    """Return the contenders' jobs, hpZ alone only where a node has several ranks."""
    jobs = []
    for name in names:
        side, flags, has_hpz = CONTENDERS[name]
        if name == "zero-3-hpz" and ranks_per_node == 1:
            continue
        zero = {**flags, **({"zero_hpz_partition_size": ranks_per_node} if has_hpz else {})}
        jobs.append(
            Job(
                *(name, side, shape),
                micro_batch=1,
                steps=steps,
                warmup=warmup,
                dtype="bf16",
                lr=3e-4,
                stage=3,
                zero=zero,
                top={"check_grad_overflow": False},  # as the others: nothing skips a step
                ranks=len(NODES) * ranks_per_node,
                is_repeating=True,
            )
        )
    return jobs


def compare(
    jobs_by_count: Mapping[int, Sequence[Job]],
    rates: Sequence[int],
    *,
    rounds: int,
    output: Path,
) -> None:
    """Measure the contenders, by ranks per node, at all rates in every process.

    Raises:
        LinkError: the system makes no link.
    """
    console = make_console()
    output.mkdir(parents=True, exist_ok=True)
    runs: list[Row] = []
    with Link.made() as link:
        links = [_measure_link(link, rate, console.print) for rate in sorted(set(rates))]
        for count, jobs in jobs_by_count.items():
            ranks = "1 rank" if count == 1 else f"{count} ranks"
            title = f"{jobs[0].shape.numel / 1e6:.0f} M parameters, 2 nodes of {ranks}"
            found = take_turns(
                jobs,
                rounds,
                lambda job: _run(link, job, rates),
                lambda line, title=title: console.print(f"{title}: {line}"),  # type: ignore[misc]
            )
            planned = {job.name: _planned_bytes(job) for job in jobs}
            for place, rate in enumerate(rates):
                rows = {
                    name: summed_up(by_round, place, count, planned[name])
                    for name, by_round in found.items()
                }
                run: Row = {"title": title, "rate_mbit": rate, "ranks_per_node": count}
                run["job"] = {
                    "shape": asdict(jobs[0].shape),
                    "micro_batch": jobs[0].micro_batch,
                    "ranks_per_node": count,
                    "rates": list(rates),
                    "steps": jobs[0].steps,
                    "warmup": jobs[0].warmup,
                }
                runs.append(run | {"contenders": rows_of(rows, rate=rate)})
    report = {"rounds": rounds, "bars": BARS, "machine": machine(), "links": links, "runs": runs}
    write_json(output / "comm.json", report)
    save_picture(runs, output / "comm.png")
    console.print(f"written to {output}")
    for run in runs:
        console.print(table(run), *reasons(run["contenders"]), sep="\n")


def _measure_link(link: Link, rate: int, say: Say) -> Row:
    """Return the rates of plain TCP over the link, both ways at once, and within a node."""
    link.limit(rate)
    environment = own_environment()
    nbytes = int(rate * 1e6 / BITS * LINK_SECONDS)
    across = [speed / 1e6 * BITS for speed in measure_link(link, nbytes, environment)]
    within = measure_node(link, NODE_NBYTES, environment) / 1e6 * BITS
    say(
        f"link of {rate} Mbit/s: plain TCP reaches {across[0]:.0f} and {across[1]:.0f} Mbit/s, "
        f"both ways at once; within a node {within:.0f} Mbit/s"
    )
    return {"rate_mbit": rate, "across_mbit": across, "within_mbit": within}


def _run(link: Link, job: Job, rates: Sequence[int]) -> Row:
    """Run torchrun in both nodes. Return ``ranks``: by rank, a row per rate."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        environment = {**own_environment(), **CPU_ALONE}
        try:
            run_together(
                [_torchrun(link, node, job, rates, folder) for node in NODES],
                [{**environment, "GLOO_SOCKET_IFNAME": link.devices[node]} for node in NODES],
                folder,
            )
        except RankError as error:
            link.end_processes()  # torchrun was killed, and its ranks were not
            print(error.log, file=sys.stderr)
            return {"failure": f"failed: {error}"}
        files = [folder / f"rank{rank}.json" for rank in range(job.ranks)]
        found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        return {"ranks": [of_rank["rates"] for of_rank in found]}


def _torchrun(link: Link, node: int, job: Job, rates: Sequence[int], folder: Path) -> list[str]:
    arguments = {"job": job, "rates": list(rates), "device": link.devices[node]}
    return link.command(
        node,
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(len(NODES)), "--node-rank", str(node)),
            *("--nproc-per-node", str(job.ranks // len(NODES))),
            *("--master-addr", link.addresses[0], "--master-port", str(PORT)),
            *("--local-addr", link.addresses[node]),
            *program("benchmarks.experiments.comm.rank:measure", arguments, folder),
        ],
    )


def _planned_bytes(job: Job) -> int | None:
    """Return the bytes that a node sends to the other per step, by this engine's plan."""
    if job.side != "zero":
        return None
    per_node = job.ranks // len(NODES)
    model = job.meta_model()
    plan = zero_core.plan(
        model, job.config(), job.ranks, ranks_per_node=per_node, device_type="cpu"
    )
    return per_node * sum(kind.between_nodes_bytes for kind in plan.traffic)
