"""Parameters and states off the device at stage 3, by micro-batches: part of `offload`.

[Note: figures]
to rival    median step over the fastest of DeepSpeed's with the same micro-batches and place
memory      peak resident memory of a rank over what it was before the model; to rival: over the
            least of DeepSpeed's
read        bytes of parameters and states that a rank's step reads from files, as the engine
            counts them, over `closed_form`; written: likewise
disk        bytes that the process read from the disk and wrote to it in a step, by the kernel
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.experiments.engine import MODEL, VOCAB, Contenders, panels
from benchmarks.harness.job import Job
from benchmarks.harness.memory import MIB
from benchmarks.harness.options import parse_size
from benchmarks.harness.ranks import Row
from benchmarks.harness.report import MS, Column, Rows, Section, judged
from benchmarks.harness.rounds import has_figures, measured, quotient

BARS = {"step_to_rival": 0.5, "memory_to_rival": 0.55, "loss": 1e-5}
"""At most. Loss: how far, relatively, from this engine's with as many micro-batches."""
VERTICAL, RECOMPUTED = "-vertical", "-recomputed"
NUM_STATES = 3
"""fp32 numbers per parameter: the master weight and Adam's moments."""
OWN_BUFFERS = 5
"""For parameters, the default."""
_BUFFERS = (5, 32)
"""Of DeepSpeed, for parameters: its default, and as many as its prefetch of 5e7 elements fills."""
_PREFETCH = {5: 2_000_000, 32: 50_000_000}
_IN_HOST = {"device": "cpu", "pin_memory": False}
_HOST = {"offload_optimizer": _IN_HOST, "offload_param": _IN_HOST}
_FILES = {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}
CONTENDERS: Contenders = {
    **{f"deepspeed-files-{count}": ("deepspeed", 3, _FILES) for count in _BUFFERS},
    "zero-files": ("zero", 3, _FILES),
    f"zero-files{VERTICAL}": ("zero", 3, _FILES),
    f"zero-files{VERTICAL}{RECOMPUTED}": ("zero", 3, _FILES),
    "deepspeed-host": ("deepspeed", 3, _HOST),
    "zero-host": ("zero", 3, _HOST),
    f"zero-host{VERTICAL}": ("zero", 3, _HOST),
    f"zero-host{VERTICAL}{RECOMPUTED}": ("zero", 3, _HOST),
}
"""``files``: parameters and states in files; ``host``: both in host memory. ``recomputed``: blocks
are computed again in backward, so that of a micro-batch the borders of blocks alone are kept."""


def races(
    names: Sequence[str],
    sizes: Sequence[str],
    ranks: Sequence[int],
    accumulations: Sequence[int],
    folder: Path,
    context: int,
    common: Mapping[str, Any],
) -> list[list[Job]]:
    """Return the contenders' jobs in fp32, a list for each size, number of ranks and k.

    With k = 1 there is one schedule.
    """
    found = []
    for size in sizes:
        shape = parse_size(size, vocab=VOCAB, context=context)
        for count in ranks:
            job = Job("", "", shape, model=MODEL, lr=3e-4, stage=3, ranks=count, **common)
            for k in accumulations:
                chosen = [name for name in names if k > 1 or VERTICAL not in name]
                found.append([_job(name, replace(job, accumulation=k), folder) for name in chosen])
    return [jobs for jobs in found if jobs]


def _job(name: str, job: Job, folder: Path) -> Job:
    side, _, zero = CONTENDERS[name]
    if "files" in name:
        place = {"device": "nvme", "nvme_path": str(folder)}
        blocks: dict[str, Any] = {"offload_optimizer": place, "offload_param": place}
        zero = {
            **blocks,
            "offload_param": {**place, "max_in_cpu": 0},
            **(_deepspeed_files(name, blocks, job) if side == "deepspeed" else {}),
        }
    schedule = "vertical" if VERTICAL in name else "horizontal"
    top: dict[str, Any] = {"accumulation_schedule": schedule} if side == "zero" else {}
    if RECOMPUTED in name:
        top["activation_checkpointing"] = {"enabled": True}
    return replace(job, name=name, side=side, zero=zero, top=top)


def _deepspeed_files(name: str, blocks: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """Return DeepSpeed's keys. Without limits of 0 it runs out of buffers, and says so."""
    count = int(name.rpartition("-")[2])
    largest = max(p.numel() for p in job.meta_model().parameters())
    return {
        "offload_param": {
            **blocks["offload_param"],
            "pin_memory": False,
            "max_in_cpu": 0,
            "buffer_count": count,
            "buffer_size": -(-largest // job.ranks) + 4096,  # and its padding
        },
        "offload_optimizer": {**blocks["offload_optimizer"], "pin_memory": False},
        "stage3_prefetch_bucket_size": _PREFETCH[count],
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    }


def closed_form(shard_bytes: Sequence[int], passes: int) -> tuple[int, int]:
    """Return the bytes that a rank's step reads from files and writes to them, in fp32.

    A shard is read if it was updated, or if as many others as there are buffers were fetched since.

    Args:
        shard_bytes: of the root's shard and of each block's.
        passes: the micro-batches with the horizontal schedule, 1 with the vertical one.
    """
    forward = range(len(shard_bytes))
    order = passes * [*forward, *forward[-2:0:-1]]
    read, last_at = 0, dict[int, int]()
    for at, shard in enumerate(order):
        since = order[last_at[shard] + 1 : at] if shard in last_at else forward
        if len({*since}) >= min(OWN_BUFFERS, len(forward)):
            read += shard_bytes[shard]
        last_at[shard] = at
    states = NUM_STATES * sum(shard_bytes)
    return read + states, sum(shard_bytes) + states


def compared(rows: Rows, job: Job) -> dict[str, Row]:
    """Return the rows with [Note: figures], or None where there is nothing to compare with."""
    there = measured(rows)
    own = [row["last_loss"] for name, row in there.items() if name.startswith("zero")]
    reference = next(iter([*own, *(row["last_loss"] for row in there.values())]), math.nan)
    found: dict[str, Row] = {}
    for name, row in rows.items():
        found[name] = row
        if not has_figures(row):
            continue
        place = name.split("-")[1]
        rivals = [r for n, r in there.items() if n.startswith(f"deepspeed-{place}")]
        is_own = name.startswith("zero") and rivals
        fastest = min(r["median_s"] for r in rivals) if is_own else None
        least = min(r["added_mib_per_rank"] for r in rivals) if is_own else None
        counted, num = row["counted"], job.ranks * len(row["times_s"])
        read = written = None
        if row["shard_bytes"]:
            passes = 1 if VERTICAL in name else job.accumulation
            expected = closed_form(row["shard_bytes"], passes)
            read = counted["read_bytes"] / num / expected[0]
            written = counted["written_bytes"] / num / expected[1]
        found[name] = row | {
            "step_to_rival": quotient(row["median_s"], fastest),
            "memory_to_rival": quotient(row["added_mib_per_rank"], least),
            "read_to_closed_form": read,
            "written_to_closed_form": written,
            "disk_read_mib": counted["disk_read_bytes"] / num / MIB,
            "disk_written_mib": counted["disk_written_bytes"] / num / MIB,
            "is_loss_close": math.isclose(row["last_loss"], reference, rel_tol=BARS["loss"]),
        }
    return found


def section(job: Job, rows: Rows) -> Section:
    def against(key: str) -> Column:
        def cell(row: Row) -> str | None:
            value = row[key]
            return judged(value, ".2f", value is not None and value <= BARS[key])

        return Column("to rival", cell)

    def exactly(heading: str, key: str) -> Column:
        def cell(row: Row) -> str | None:
            return judged(row[key], ".6g", row[key] == 1)

        return Column(heading, cell)

    def loss(row: Row) -> str:
        return f"{row['last_loss']:.6f}{'' if row['is_loss_close'] else ' differs'}"

    columns = (
        Column("step", "median_s", ".0f", MS),
        Column("min", "min_s", ".0f", MS),
        against("step_to_rival"),
        Column("memory", "added_mib_per_rank", ".0f"),
        against("memory_to_rival"),
        exactly("read", "read_to_closed_form"),
        exactly("written", "written_to_closed_form"),
        Column("disk read", "disk_read_mib", ".1f"),
        Column("disk written", "disk_written_mib", ".1f"),
        Column("loss", loss),
    )
    caption = (
        f"ms, MiB per rank; bars: step <= {BARS['step_to_rival']:g} and memory <= "
        f"{BARS['memory_to_rival']:g} of DeepSpeed's, bytes of files over the closed form exactly "
        f"1, losses within {BARS['loss']:g}"
    )
    title = f"{job.title}, {job.accumulation} micro-batches"
    named = f"parameters and states off the device: {title}"
    return Section(named, rows, columns, caption, "contender", panels(title, rows))
