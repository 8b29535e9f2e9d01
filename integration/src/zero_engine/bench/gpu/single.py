"""One device, nothing offloaded: tokens per second of the engine over those of plain torch.

Plain torch is what its users write, with a fused AdamW: in bf16 either autocast over fp32 weights,
or bf16 weights with fp32 master weights kept by hand, which are the engine's numbers. The faster of
the two is what the engine is held against. The row "all in bf16" has no master weights, so it
trains other numbers; it shows what those cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from matplotlib.axes import Axes
from rich.table import Table

from zero_engine.bench.gpt import GptShape
from zero_engine.bench.gpu.part import Context, Part, Row
from zero_engine.bench.gpu.tables import draw_speeds, table_of_steps
from zero_engine.bench.gpu.training.job import Job
from zero_engine.bench.gpu.training.start import train_in_turns
from zero_engine.bench.offload_cuda.settings import DRY, GIB

__all__ = ["PART", "judged", "single_jobs"]

SHAPE = GptShape(layers=24, width=1024, heads=16, vocab=50257, context=1024)
ROUNDS = 3
DRY_CONTENDERS = ("torch", "stage 3")
BASELINES = ("torch", "torch, masters by hand")
BARS = {0: 0.98, 1: 0.98, 2: 0.98, 3: 0.95}
"""Of plain torch's tokens per second, by stage."""


def single_jobs(*, is_dry_run: bool) -> list[Job]:
    """Every contender, in turns: those that are compared stand beside each other."""
    size: dict[str, Any] = {"shape": SHAPE, "micro_batch": 8, "steps": 20, "warmup": 5}
    size["num_traced"] = 2
    if is_dry_run:
        size |= {"shape": DRY.shape, "micro_batch": 2, "steps": 2, "warmup": 1}
    jobs = []
    for dtype in ("bf16",) if is_dry_run else ("bf16", "fp32"):
        sides = [("torch", "torch", 0), *((f"stage {s}", "zero", s) for s in BARS)]
        sides += [("fsdp2", "fsdp2", 3), ("deepspeed stage 3", "deepspeed", 3)]
        if dtype == "bf16":
            sides.insert(1, ("torch, masters by hand", "torch_masters", 0))
            sides.append(("torch, all in bf16", "torch_low", 0))
        if is_dry_run:
            sides = [side for side in sides if side[0] in DRY_CONTENDERS]
        jobs += [Job(f"{dtype}: {name}", side, dtype, stage, **size) for name, side, stage in sides]
    return jobs


def judged(rows: Mapping[str, Row], *, is_judged: bool) -> dict[str, Row]:
    """The rows with ``to_torch``, tokens per second over plain torch's fastest in the same dtype.

    Args:
        rows: by contender.
        is_judged: whether bars apply: not on the CPU.
    """
    found = {}
    for name, row in rows.items():
        dtype, _, who = name.partition(": ")
        speeds = [rows.get(f"{dtype}: {plain}", {}).get("tokens_per_s") for plain in BASELINES]
        plain = max((speed for speed in speeds if speed is not None), default=None)
        stage = int(who.removeprefix("stage ")) if who.startswith("stage ") else None
        if "tokens_per_s" in row and plain is not None:
            ratio, bar = row["tokens_per_s"] / plain, None if stage is None else BARS[stage]
            is_met = None if bar is None or not is_judged else ratio >= bar
            row = {**row, "to_torch": ratio, "bar": bar, "is_met": is_met}
        found[name] = row
    return found


def _run(context: Context) -> Row:
    jobs = single_jobs(is_dry_run=context.is_dry_run)
    rows = train_in_turns(jobs, 1 if context.is_dry_run else ROUNDS, context)
    return {"rows": judged(rows, is_judged=not context.is_dry_run)}


def _table(found: Mapping[str, Any]) -> Table:
    return table_of_steps(
        found,
        _cells,
        ("tokens/s", "ms", "to torch", "device GiB", "last loss"),
        title="nothing offloaded",
        caption="medians over rounds; bars: 0.98, stage 3 0.95",
    )


def _cells(row: Row) -> Iterable[str]:
    device = row["device_peak_bytes"]
    yield f"{row['tokens_per_s']:,.0f}"
    yield f"{row['step_s'] * 1e3:.1f}"
    yield f"{row['to_torch']:.3f}" if "to_torch" in row else ""
    yield "" if device is None else f"{device / GIB:.2f}"
    yield f"{row['losses'][-1]:.4f}"


def _draw(axes: Axes, found: Mapping[str, Any]) -> None:
    draw_speeds(axes, found, ours=": stage")


PART = Part(
    name="single",
    about="nothing offloaded, beside plain torch, FSDP2 and DeepSpeed",
    share=8.0,
    run=_run,
    table=_table,
    draw=_draw,
)
