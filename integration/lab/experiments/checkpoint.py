"""Checkpoint saves, synchronous and asynchronous, compared with torch.distributed.checkpoint.

Every contender trains the same GPT-2 in fp32 with AdamW in a fresh process and saves twice. The
contenders run in turn.

[Note: figures]
step     median step time without a save
pause    seconds until the second call of save returns. By then a stager has allocated its buffers
beside   median time of the steps that run during the save
longest  longest time of these steps
save     seconds from the call until the checkpoint is complete
memory   largest growth of memory during the save, over this process and its children. A shared page
         counts in part (Pss). Sampled every 0.1 s
"""

from __future__ import annotations

import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_at_once

import zero_core
from benchmarks.harness.job import Job
from benchmarks.harness.memory import MIB
from benchmarks.harness.models import GptShape
from benchmarks.harness.options import RESULTS, Output, Rounds, Steps, of
from benchmarks.harness.ranks import Place, Row, Runner
from benchmarks.harness.report import MS, Column, Section, machine, publish
from benchmarks.harness.rounds import has_figures, take_turns
from benchmarks.harness.sides import engine_loop

_INTERVAL_S = 0.1
_NUM_SAVES = 2
Save = Callable[[Path], Future[Any] | None]
Loop = Callable[[torch.Tensor], torch.Tensor]


def measure(place: Place, job: Mapping[str, Any], way: str, folder: str) -> Row:
    """Return the figures of one contender. See [Note: figures]."""
    what = Job.of(job)
    torch.set_num_threads(what.threads)
    place.join()
    batches = what.batches(place.rank)
    step, save = CONTENDERS[way](what)
    quiet_s = [_seconds(lambda: step(next(batches))) for _ in range(what.warmup + what.steps)]
    row: Row = {"step_s": statistics.median(quiet_s[what.warmup :])}
    for number in range(_NUM_SAVES):
        with tempfile.TemporaryDirectory(dir=folder) as target, _watched_memory() as memory:
            started_at = time.perf_counter()
            pending = save(Path(target, "saved"))
            row["pause_s"] = time.perf_counter() - started_at
            beside_s = []
            while pending is not None and not pending.done():
                beside_s.append(_seconds(lambda: step(next(batches))))
            if pending is not None:
                pending.result()
            row["save_s"] = time.perf_counter() - started_at
        row["memory_bytes"] = memory[0]
        row["beside_s"] = statistics.median(beside_s) if beside_s else None
        row["longest_s"] = max(beside_s, default=None)
        if number + 1 < _NUM_SAVES:
            step(next(batches))
    return row


def _seconds(run: Callable[[], object]) -> float:
    started_at = time.perf_counter()
    run()
    return time.perf_counter() - started_at


@contextmanager
def _watched_memory() -> Iterator[list[int]]:
    """Yield a list. When the context ends, its first element is the growth of memory in bytes."""
    before, growth, is_over = _shared_bytes(), [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(_INTERVAL_S):
            growth[0] = max(growth[0], _shared_bytes() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield growth
    finally:
        is_over.set()
        thread.join()


def _shared_bytes() -> int:
    """Return the proportional set size (Pss) of this process and its children, in bytes."""
    pids = ["self"]
    for task in Path("/proc/self/task").iterdir():
        pids += (task / "children").read_text().split()
    total = 0
    for pid in pids:
        try:
            found = re.search(
                r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M
            )
        except OSError:  # the process has ended
            continue
        total += int(found[1]) * 1024 if found else 0
    return total


def _engine(job: Job) -> tuple[Loop, zero_core.Engine]:
    engine = zero_core.build(job.make_model(), job.config())
    return engine_loop(engine), engine


def _ours_at_once(job: Job) -> tuple[Loop, Save]:
    step, engine = _engine(job)

    def save(folder: Path) -> None:
        engine.save_checkpoint(folder)

    return step, save


def _ours_beside(job: Job) -> tuple[Loop, Save]:
    step, engine = _engine(job)
    return step, engine.async_save


def _torch_loop(job: Job) -> tuple[Loop, Callable[[], dict[str, Any]]]:
    model = job.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **job.adamw)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(ids)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _dcp_at_once(job: Job) -> tuple[Loop, Save]:
    step, state = _torch_loop(job)

    def save(folder: Path) -> None:
        save_at_once(state(), checkpoint_id=folder)

    return step, save


def _dcp(**options: Any) -> Callable[[Job], tuple[Loop, Save]]:
    """Return a contender that saves by ``async_save``. Functions in ``options`` make arguments."""

    def make(job: Job) -> tuple[Loop, Save]:
        step, state = _torch_loop(job)
        made = {name: value() for name, value in options.items()}

        def save(folder: Path) -> Future[Any]:
            found = async_save(state(), checkpoint_id=folder, **made)
            return found if isinstance(found, Future) else found.upload_completion

        return step, save

    return make


def _stager() -> DefaultStager:
    """Return a stager that reuses its buffers, which are pinned if CUDA is available."""
    is_here = torch.cuda.is_available()
    return DefaultStager(StagingOptions(is_here, False, is_here, is_here))


CONTENDERS: Mapping[str, Callable[[Job], tuple[Loop, Save]]] = {
    "zero, at once": _ours_at_once,
    "zero, beside": _ours_beside,
    "dcp, at once": _dcp_at_once,
    "dcp, thread": _dcp(),
    "dcp, kept buffers": _dcp(async_stager=_stager),
    "dcp, process": _dcp(async_checkpointer_type=lambda: AsyncCheckpointerType.PROCESS),
}


def main(
    layers: Annotated[int, typer.Option(min=1)] = 24,
    width: Annotated[int, typer.Option(min=64, help="A multiple of 64.")] = 1152,
    context: Annotated[int, typer.Option(min=2)] = 128,
    steps: Steps = 5,
    rounds: Rounds = 2,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    contenders: Annotated[list[str] | None, of(CONTENDERS, "--contender")] = None,
    folder: Annotated[Path | None, typer.Option(help="On the disk that is written to.")] = None,
    output: Output = RESULTS,
) -> None:
    """Measure, write ``checkpoint.json``, and print a table."""
    shape = GptShape(layers, width, heads=width // 64, vocab=8192, context=context)
    job = Job(
        *("", "zero", shape), micro_batch=1, steps=steps, warmup=1, threads=threads, dtype="fp32"
    )
    runner = Runner()
    place = Path(tempfile.gettempdir()) if folder is None else folder

    def run(name: str, number: int) -> Row:
        arguments = {"job": job, "way": name, "folder": str(place)}
        return runner.start(f"{__name__}:measure", arguments, threads=threads)[0]

    found = take_turns(contenders or list(CONTENDERS), rounds, run)
    rows = {name: _median(rounds_of) for name, rounds_of in found.items()}
    columns = [
        Column("step, ms", "step_s", ".0f", MS),
        Column("pause, ms", "pause_s", ".1f", MS),
        Column("step beside, ms", "beside_s", ".0f", MS),
        Column("longest, ms", "longest_s", ".0f", MS),
        Column("save, s", "save_s", ".2f"),
        Column("memory, MiB", "memory_bytes", ".0f", MIB),
    ]
    title = f"Saves of {job.title}, {12 * shape.numel // MIB} MiB of states"
    report = {"machine": machine(), "workload": job.workload, "rounds": found}
    publish(output, "checkpoint", report, [Section(title, rows, columns)])


def _median(rounds: list[Row]) -> Row:
    """Return the medians over all rounds, or the last round's failure."""
    if not has_figures(rounds[-1]):
        return rounds[-1]
    found: Row = {}
    for key in rounds[0]:
        values = [row[key] for row in rounds if row[key] is not None]
        found[key] = statistics.median(values) if values else None
    return found
