"""Ten configurations with a deliberate fault: does the report's first sentence name its cause?

For each case two engines train the same GPT-2 on the same ranks in turn, one with the fault and one
without, so that a slow moment of the machine affects both. Both are recorded. The report uses the
records of the faulty engine only.

[Note: figures]
found      cause that the report's first sentence names
predicted  update time that the report predicts after the fix, over the present update time
real       measured update time of the fixed engine over that of the faulty one
off        predicted over real, less 1. The bar is 15%

For the case ``recomputation`` these figures are peak memory per rank instead of seconds, and each
engine has its own processes. Pageable memory costs nothing on a CPU. The records of its case are
edited to show an accelerator's device, key and copy times, so the case has no real gain.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch

# An optimizer imports torch._dynamo. If that happened while a process group exists, the group
# would live until exit.
import torch._dynamo
import torch.distributed as dist
import typer
from torch import Tensor, nn

import zero_core
from benchmarks.experiments.comm.link import Link, missing_for_link
from benchmarks.harness.job import Job
from benchmarks.harness.models import GptShape
from benchmarks.harness.options import RESULTS, Output, of
from benchmarks.harness.ranks import HERE, Node, Place, RankError, Row, run_ranks
from benchmarks.harness.report import Column, Section, machine, write_report
from zero_engine.report.compose import judge
from zero_engine.report.diagnosis import Cause
from zero_engine.report.run import Measured, measure, read_run

BAR = 0.15
RATE_MBIT = 300
_SHAPE = GptShape(layers=4, width=256, heads=4, vocab=512, context=64)
_WIDE = GptShape(layers=3, width=512, heads=4, vocab=512, context=64)
_HEAVY = GptShape(layers=4, width=768, heads=4, vocab=256, context=8)
"""A model with few tokens for many parameters, so that the update dominates a step."""
_SLOW_RULE = {"optimizer": {"type": "RAdam", "params": {"lr": 1e-4}}}
"""An optimizer for which no host kernel exists."""
_HOST = {"offload_optimizer": {"device": "cpu", "ratio": 1.0}}


@dataclass(frozen=True)
class Setup:
    """One of a case's two engines: configuration keys and a fault."""

    zero: Mapping[str, Any] = field(default_factory=dict)
    top: Mapping[str, Any] = field(default_factory=dict)
    stage: int = 2
    micro_batch: int = 4
    micro_steps: int = 1
    threads: int = 1
    fault: str = ""
    """Name of a fault of `_Loop`, or an empty string."""


@dataclass(frozen=True)
class Case:
    """A faulty configuration and the fixed one."""

    cause: str
    """Value of `zero_engine.report.diagnosis.Cause.key`."""
    spoilt: Setup
    mended: Setup
    ranks: int = 2
    shape: GptShape = _SHAPE
    is_linked: bool = False
    """Whether a slow link separates the ranks."""
    is_apart: bool = False
    """Whether each engine has its own processes."""


_PLAIN = Setup()
CASES: Mapping[str, Case] = {
    "host ratio": Case(
        "host",
        Setup(_HOST, micro_batch=1, top=_SLOW_RULE),
        Setup(
            {"offload_optimizer": {"device": "cpu", "ratio": 0.75}}, micro_batch=1, top=_SLOW_RULE
        ),
        shape=_HEAVY,
    ),
    "one thread": Case(
        "threads", Setup(micro_batch=8), Setup(micro_batch=8, threads=2), ranks=1, shape=_WIDE
    ),
    "link, stage 3": Case(
        "link",
        Setup(stage=3, micro_batch=1),
        Setup(stage=2, micro_batch=1),
        is_linked=True,
        shape=_WIDE,
    ),
    "recomputation": Case(
        "recomputation",
        Setup(micro_batch=16),
        Setup(micro_batch=16, top={"activation_checkpointing": {"enabled": True}}),
        ranks=1,
        shape=replace(_SHAPE, layers=12, context=128),
        is_apart=True,
    ),
    "pageable memory": Case("pageable", Setup(_HOST), Setup(_HOST), ranks=1),
    "straggler": Case("straggler", Setup(fault="slow"), _PLAIN),
    "tiny micro-batch": Case(
        "micro_batch",
        Setup(micro_batch=1, micro_steps=8),
        Setup(micro_batch=8),
        ranks=1,
        shape=replace(_WIDE, context=16),
    ),
    "NVMe": Case(
        "nvme",
        Setup({"offload_optimizer": {"device": "nvme", "nvme_path": "FOLDER"}}, micro_batch=1),
        Setup(_HOST, micro_batch=1),
        ranks=1,
        shape=_HEAVY,
    ),
    "NaN in one rank": Case("nan", Setup(fault="nan"), _PLAIN),
    "logging every step": Case(
        "outside", Setup(fault="logging"), Setup(fault="logging now and then"), ranks=1
    ),
}


def train(
    place: Place, shape: Mapping[str, Any], setups: Mapping[str, Any], folder: str, turns: int,
    steps: int,
) -> Row:  # fmt: skip
    """Train the engines in turn.

    Each writes its step records to the subfolder of ``folder`` that has its name in ``setups``.
    """
    if place.world_size > 1:
        place.join()
    found = {name: Setup(**setup) for name, setup in setups.items()}
    loops = {}
    for name, setup in found.items():
        torch.set_num_threads(setup.threads)
        loops[name] = _Loop(place, GptShape(**shape), setup, Path(folder, name))
    for _ in range(turns):
        for loop in loops.values():
            if dist.is_initialized():
                dist.barrier()
            loop.run(steps)
    for loop in loops.values():
        loop.engine.close()
    return {}


class _Loop:
    def __init__(self, place: Place, shape: GptShape, setup: Setup, folder: Path) -> None:
        job = Job(
            *("", "zero", shape, setup.micro_batch),
            steps=0,
            stage=setup.stage,
            zero=json.loads(json.dumps(setup.zero).replace("FOLDER", str(folder.parent))),
            top={"gradient_accumulation_steps": setup.micro_steps, **setup.top},
        )
        self._rank, self._setup, self._folder = place.rank, setup, folder
        self._batches = job.batches(place.rank)
        model = job.make_model()
        if setup.fault == "slow" and place.rank == 1:
            model.blocks[1].register_forward_pre_hook(_be_slow)
        self.engine = zero_core.build(model, job.config())
        folder.mkdir(exist_ok=True)
        self.engine.record(folder, detail_every=5)

    def run(self, steps: int) -> None:
        torch.set_num_threads(self._setup.threads)
        for _ in range(steps):
            for _ in range(self._setup.micro_steps):
                loss = self.engine(next(self._batches))
                if self._setup.fault == "nan" and self._is_spoilt():
                    loss = loss * torch.nan
                self.engine.backward(loss)
                self.engine.step()
            every = {"logging": 1, "logging now and then": 50}.get(self._setup.fault)
            if every is not None and self.engine.global_steps % every == 0:
                _log_all(self.engine, self._folder / "log.jsonl", loss)

    def _is_spoilt(self) -> bool:
        return self._rank == 1 and self.engine.global_steps % 4 == 3


def _be_slow(module: nn.Module, args: Any) -> None:
    time.sleep(0.06)


def _log_all(engine: zero_core.Engine, path: Path, loss: Tensor) -> None:
    """Log statistics of every parameter, as some programs do."""
    entry: dict[str, Any] = {"loss": loss.item()}
    with engine.gathered() as module:
        for name, param in module.named_parameters():
            values = param.detach().flatten()
            entry[name] = {
                "norm": values.norm().item(),
                "histogram": torch.histc(values, 50).tolist(),
                "quantiles": torch.quantile(values[:100_000], torch.linspace(0, 1, 5)).tolist(),
            }
    with path.open("a") as log:
        log.write(json.dumps(entry) + "\n")


def run_case(case: Case, folder: Path, turns: int, steps: int) -> None:
    """Run both engines of a case.

    Raises:
        RankError: a rank failed.
    """
    setups = {"spoilt": case.spoilt, "mended": case.mended}
    groups = [{n: s} for n, s in setups.items()] if case.is_apart else [setups]
    with ExitStack() as stack:
        nodes: list[Node] = [HERE]
        if case.is_linked:
            link = stack.enter_context(Link.made())
            link.limit(RATE_MBIT)
            nodes = link.nodes
        for group in groups:
            arguments = {
                "shape": case.shape,
                "setups": group,
                "folder": str(folder),
                "turns": turns,
                "steps": steps,
            }
            run_ranks(f"{__name__}:train", arguments, case.ranks, nodes=nodes)


def measure_case(name: str, case: Case, turns: int, steps: int) -> Row:
    """Run a case and return its figures, or the reason why there are none."""
    if case.is_linked and (reason := missing_for_link()):
        return {"skipped": reason}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            run_case(case, Path(scratch), turns, steps)
        except RankError as error:
            return {"failure": str(error)}
        return judge_case(name, case, Path(scratch))


def judge_case(name: str, case: Case, folder: Path) -> Row:
    """Return the figures of a case. See [Note: figures]."""
    if name == "pageable memory":
        _put_in_an_accelerator(folder / "spoilt")
    spoilt, mended = (measure(read_run(folder / part)) for part in ("spoilt", "mended"))
    limit = None
    if case.cause == "recomputation":
        limit = round(1.02 * _amount(spoilt, case))
    verdict, causes = judge(spoilt, limit)
    row: Row = {"sentence": verdict.sentence, "found": causes[0].key if causes else ""}
    row["is_found"] = row["found"] == case.cause
    row["spoilt"] = _amount(spoilt, case)
    cause = next((c for c in causes if c.key == case.cause), None)
    if cause is not None:
        row |= {"change": cause.change, "predicted": _predicted(cause)}
    if name != "pageable memory":
        row |= {"mended": _amount(mended, case), "real": _amount(mended, case) / row["spoilt"]}
    if "real" in row and "predicted" in row:
        row["off"] = row["predicted"] / row["real"] - 1.0
    return row


def _predicted(cause: Cause) -> float:
    return cause.after / cause.before


def _amount(found: Measured, case: Case) -> float:
    if case.cause == "recomputation":
        return float(max(rank.peak_bytes for rank in found.ranks))
    if case.cause == "nan":
        return found.seconds + found.skipped_s * found.num_skipped / (
            found.num_all - found.num_skipped
        )
    return found.seconds


def _put_in_an_accelerator(folder: Path) -> None:
    """Edit records of a CPU to look like an accelerator that copies through pageable memory."""
    for path in folder.glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line]
        for line in lines:
            if line["kind"] == "run":
                line["environment"]["device"] = "cuda"
                line["config"]["zero_optimization"]["offload_optimizer"]["pin_memory"] = False
            if line["kind"] == "step":
                line["waits"]["update"] = line["seconds"] / 2
                line["seconds"] *= 1.5
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main(
    cases: Annotated[list[str] | None, of(CASES, "--case")] = None,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each engine.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a turn.")] = 8,
    output: Output = RESULTS,
) -> None:
    """Run the cases, write ``diagnose.json``, and print a table."""
    file = output / "diagnose.json"
    rows: dict[str, Row] = {}
    # Cases may be run one at a time, so keep the other cases' results.
    if cases and len(cases) < len(CASES) and file.exists():
        rows = json.loads(file.read_text(encoding="utf-8"))["figures"]
    for name in cases or CASES:
        print(name, flush=True)
        rows[name] = measure_case(name, CASES[name], turns, steps)
        print(f"  {rows[name].get('sentence', '')}", flush=True)
        write_report(output, "diagnose", {"machine": machine(), "figures": rows})
    columns = [
        Column("found", "found"),
        Column("cause named", "is_found"),
        Column("predicted", "predicted", ".0%"),
        Column("real", "real", ".0%"),
        Column("off", "off", "+.0%"),
        Column("within 15%", lambda row: abs(row["off"]) <= BAR if "off" in row else None),
    ]
    section = Section(
        "Spoilt configurations: an update after the change over one before", rows, columns
    )
    section.show()
