"""``python -m zero_engine.bench``: the benchmarks by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from zero_engine.bench import cpu_adam as host_adam
from zero_engine.bench import cpu_adam_convergence as convergence
from zero_engine.bench import offload as offloading
from zero_engine.bench.comm import race as slow_link
from zero_engine.bench.comm.contenders import CONTENDERS as SENDERS
from zero_engine.bench.comm.job import Job
from zero_engine.bench.comm.link import LinkError, missing_for_link
from zero_engine.bench.contenders import CONTENDERS
from zero_engine.bench.engine import compare
from zero_engine.bench.gpt import GptShape
from zero_engine.bench.memory import PARTS, measure_all
from zero_engine.bench.offload_contenders import OFFLOADERS
from zero_engine.bench.workload import HEAD_WIDTH, Workload

app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def benchmarks() -> None:
    """Measure every side in one run."""


@app.command()
def engine(
    rounds: Annotated[int, typer.Option(min=1, help="Times that every contender runs.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per round.")] = 6,
    warmup: Annotated[int, typer.Option(min=0, help="Untimed steps before them.")] = 2,
    ranks: Annotated[
        list[int] | None, typer.Option(min=1, help="Ranks, on the CPU; 2 and 4.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads per rank.")] = 1,
    size: Annotated[
        list[str] | None,
        typer.Option(help="LAYERSxWIDTH of the GPT-2, the width a multiple of 64; 25 M and 125 M."),
    ] = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens per sample.")] = 128,
    micro_batch: Annotated[int, typer.Option(min=1, help="Samples per rank.")] = 2,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Contenders, of: {', '.join(CONTENDERS)}.")
    ] = None,
    stage: Annotated[
        list[int] | None, typer.Option(help="Stages whose Python is profiled; 0 to 3.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for engine.json and engine.png.")] = Path(
        "integration/benchmarks/results"
    ),
) -> None:
    """Step time and peak memory: bare model, DDP, FSDP2, DeepSpeed, and this engine."""
    unknown = set(only or ()) - set(CONTENDERS)
    if unknown:
        raise typer.BadParameter(f"unknown contender {unknown.pop()!r}", param_hint="--only")
    workloads = [
        Workload(
            layers=layers,
            width=width,
            context=context,
            micro_batch=micro_batch,
            ranks=count,
            threads=threads,
            steps=steps,
            warmup=warmup,
        )
        for layers, width in map(_parse_size, size or ("6x512", "12x896"))
        for count in ranks or (2, 4)
    ]
    stages = range(4) if stage is None else stage
    compare(workloads, only or list(CONTENDERS), rounds=rounds, stages=stages, output=output)


@app.command()
def offload(
    rounds: Annotated[int, typer.Option(min=1, help="Times that every contender runs.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per round.")] = 6,
    warmup: Annotated[int, typer.Option(min=0, help="Untimed steps before them.")] = 2,
    ranks: Annotated[list[int] | None, typer.Option(min=1, help="Ranks, on the CPU; 2.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads per rank.")] = 1,
    size: Annotated[
        list[str] | None,
        typer.Option(help="LAYERSxWIDTH of the GPT-2, the width a multiple of 64; 6x512."),
    ] = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens per sample.")] = 128,
    micro_batch: Annotated[int, typer.Option(min=1, help="Samples per rank.")] = 2,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Contenders, of: {', '.join(OFFLOADERS)}.")
    ] = None,
    nvme_path: Annotated[
        Path | None, typer.Option(help="Folder for states in files; the output's by default.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for offload.json and offload.png.")] = Path(
        "integration/benchmarks/results"
    ),
) -> None:
    """States in host memory and in files: this engine and DeepSpeed's ZeRO-Offload."""
    unknown = set(only or ()) - set(OFFLOADERS)
    if unknown:
        raise typer.BadParameter(f"unknown contender {unknown.pop()!r}", param_hint="--only")
    workloads = [
        Workload(
            layers=layers,
            width=width,
            context=context,
            micro_batch=micro_batch,
            ranks=count,
            threads=threads,
            steps=steps,
            warmup=warmup,
        )
        for layers, width in map(_parse_size, size or ("6x512",))
        for count in ranks or (2,)
    ]
    offloading.compare(
        workloads,
        only or list(OFFLOADERS),
        rounds=rounds,
        nvme_path=(nvme_path or output).resolve(),
        output=output,
    )


@app.command()
def comm(
    rounds: Annotated[int, typer.Option(min=1, help="Times that every contender runs.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per round and rate.")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="Untimed steps before them.")] = 1,
    rate: Annotated[
        list[int] | None, typer.Option(min=1, help="Mbit/s of the link; 200 and 1000.")
    ] = None,
    ranks_per_node: Annotated[
        list[int] | None, typer.Option(min=1, help="Ranks of each of the two nodes; 1 and 2.")
    ] = None,
    size: Annotated[
        str, typer.Option(help="LAYERSxWIDTH of the GPT, the width a multiple of 64.")
    ] = "8x384",
    context: Annotated[int, typer.Option(min=2, help="Tokens per sample, one sample a rank.")] = 64,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", "--contenders", help=f"Contenders, of: {', '.join(SENDERS)}."),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for comm.json and comm.png.")] = Path(
        "integration/benchmarks/results"
    ),
) -> None:
    """Two nodes and a slow link between them: FSDP2, DeepSpeed, and this engine's ZeRO++. Root."""
    unknown = set(only or ()) - set(SENDERS)
    if unknown:
        raise typer.BadParameter(f"unknown contender {unknown.pop()!r}", param_hint="--only")
    layers, width = _parse_size(size)
    shape = GptShape(layers, width, heads=width // HEAD_WIDTH, vocab=512, context=context)
    jobs = [
        Job(
            shape=shape,
            micro_batch=1,
            ranks_per_node=count,
            rates=tuple(rate or (200, 1000)),
            steps=steps,
            warmup=warmup,
        )
        for count in ranks_per_node or (1, 2)
    ]
    reason = missing_for_link()
    try:
        if not reason:
            slow_link.compare(jobs, only or list(SENDERS), rounds=rounds, output=output)
    except LinkError as error:
        reason = f"the system refuses a link of two network namespaces: {error}"
    if reason:
        typer.echo(f"skipped: {reason}")


def _parse_size(size: str) -> tuple[int, int]:
    layers, _, width = size.partition("x")
    if not (layers.isdigit() and width.isdigit()) or int(layers) < 1 or int(width) < 64:
        raise typer.BadParameter(f"{size!r}: expected LAYERSxWIDTH, as 6x512", param_hint="--size")
    if int(width) % 64:
        raise typer.BadParameter(
            f"{size!r}: the width must be a multiple of 64", param_hint="--size"
        )
    return int(layers), int(width)


@app.command("cpu_adam")
def cpu_adam(
    numel: Annotated[
        list[int] | None, typer.Option(min=1, help="Elements of the large races; 64 Mi and 1 Mi.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every contender.")] = 9,
    rest_ms: Annotated[float, typer.Option(min=0, help="Rest before each turn.")] = 50.0,
    threads: Annotated[int, typer.Option(min=0, help="For everyone; 0 for torch's count.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for cpu_adam.json and .png.")] = Path(
        "integration/benchmarks/results"
    ),
) -> None:
    """One optimizer step on host memory: cpu-adam, torch, DeepSpeed, torchao, bitsandbytes."""
    settings = host_adam.Settings(
        numels=tuple(numel or (64 * 2**20, 2**20)),
        rounds=rounds,
        rest_s=rest_ms / 1e3,
        threads=threads or torch.get_num_threads(),
    )
    host_adam.compare(settings, output=output)


@app.command("cpu_adam_convergence")
def cpu_adam_convergence(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of every run.")] = 500,
    seeds: Annotated[int, typer.Option(min=1, help="Trials, each with its own seed.")] = 3,
    threads: Annotated[int, typer.Option(min=0, help="For everyone; 0 for torch's count.")] = 0,
    output: Annotated[
        Path, typer.Option(help="Folder for cpu_adam_convergence.json and .png.")
    ] = Path("integration/benchmarks/results"),
) -> None:
    """Loss of a small GPT-2 on real text: cpu-adam's fp32, int8 and bf16 states, and torch."""
    settings = convergence.Settings(
        steps=steps, seeds=seeds, threads=threads or torch.get_num_threads()
    )
    convergence.compare(settings, output=output)


@app.command()
def memory(
    only: Annotated[list[str] | None, typer.Option(help=f"Of: {', '.join(PARTS)}.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for memory.json and memory.png.")] = Path(
        "integration/benchmarks/results"
    ),
) -> None:
    """Peak memory against ZeRO's formula and against the plan; growth; start-up. Linux."""
    unknown = set(only or ()) - set(PARTS)
    if unknown:
        raise typer.BadParameter(f"unknown part {unknown.pop()!r}", param_hint="--only")
    measure_all(only or list(PARTS), output=output)


if __name__ == "__main__":
    app()
