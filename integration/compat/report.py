"""The results of the pack as a page of the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cases import Case, Planned

Row = Mapping[str, Any]
OURS = "zero-engine"
HEAD = """# What runs unmodified

    nox -s compat

Public scripts and configurations with tiny models and local data. `zero-engine run` starts them in
place of their own launcher, with 2 ranks of one thread each on the CPU. TRL's scripts are the
installed ones. The others are written for this test: they make the named project's calls with its
arguments, configuration keys and values. Each is also run with DeepSpeed 0.19.8 itself or, where
DeepSpeed does not run it on a CPU, with DDP. "Loss" is the largest relative difference from that
run at any step and on any rank; more than 1e-3 fails. Step times are medians of all steps but the
first two. A peak is the growth of a rank's resident memory over its imports. The limits that
accelerate, Lightning and the Trainer (bf16) set themselves on a CPU are lifted on both sides.
`nox -s "compat(peers)" -- --failed` runs what failed or is missing. [Data](benchmarks/compat.json).
"""
BUSY = """Rows marked `*` were measured on a busy machine: their losses and peaks are valid,
their times are not.
"""


def is_good(row: Row) -> bool:
    """Whether it ran, with the losses of its reference."""
    return "failure" not in row and row["difference"] <= row["tolerance"]


def in_words(row: Row) -> str:
    """One line on a row."""
    if "failure" in row:
        return f"FAILED with {row.get('failed', 'both')}: {row['failure']}"
    word = "" if is_good(row) else "TOO MUCH: "
    return f"{word}losses differ by {row['difference']:.1e} at most from {row['reference']}"


def counted(pack: Sequence[Case], found: Mapping[str, Row]) -> str:
    """How many of the pack run, and how many have been run."""
    good = [case for case in pack if case.key in found and is_good(found[case.key])]
    tokens = [case for case in good if not case.tolerance]
    losses = [case.reference for case in good if case.tolerance]
    by_ddp = losses.count("ddp")
    left = len(pack) - len(found)
    return (
        f"{len(good)} of {len(pack)} run"
        + (f": {len(losses)}" if tokens else "")
        + f" with the losses of DeepSpeed ({len(losses) - by_ddp}) or of DDP ({by_ddp})"
        + (f", {len(tokens)} with the same tokens" if tokens else "")
        + (f"; {left} have not been run" if left else "")
    )


def page(
    head: str, pack: Sequence[Case], planned: Sequence[Planned], found: Mapping[str, Row]
) -> str:
    """The whole page, which begins with ``head``."""
    lines = [
        head,
        f"**{counted(pack, found)}.**\n",
        *([BUSY] if any(row.get("is_busy") for row in found.values()) else []),
        "| whose | what | loss | step, theirs (ms) | step, ours (ms) | ours to theirs "
        "| peak, theirs (MiB) | peak, ours (MiB) | ours to theirs |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in pack:
        row = found.get(case.key)
        first = f"| {case.family} | {case.name}"
        if row is None:
            lines.append(f"{first} | not run | | | | | | |")
        elif "failure" in row:
            lines.append(f"{first} | **fails**: {_plain(row['failure'])} | | | | | | |")
        else:
            lines.append(f"{first}{_figures(row)}")
    others = [case for case in pack if case.compared != "loss"]
    if others:
        lines.append("\nCompared in another value, as its loss is always 0:\n")
        lines += [f"- {case.family}, {case.name}: `{case.compared}`" for case in others]
    reasons = sorted({(c.family, c.name, c.why_ddp) for c in pack if c.why_ddp})
    if reasons:
        lines.append("\nCompared with DDP (marked `ddp`), and why DeepSpeed does not run them:\n")
        lines += [f"- {family}, {name}: {why}" for family, name, why in reasons]
    if planned:
        lines.append("\nNot counted, with the reason:\n")
        lines += [f"- {one.family}, {one.name}: {one.why}" for one in planned]
    return "\n".join(lines) + "\n"


def _figures(row: Row) -> str:
    theirs, ours = row[row["reference"]], row[OURS]
    mark = " ddp" if row["reference"] == "ddp" else ""
    loss = f"{row['difference']:.1e}{mark}"
    cells = [loss if is_good(row) else f"**{loss}**"]
    for name, unit, digits in (("step_seconds", 1e-3, 0), ("peak_bytes", 2**20, 0)):
        one, other = theirs[name], ours[name]
        cells += [f"{one / unit:.{digits}f}", f"{other / unit:.{digits}f}", f"{other / one:.2f}"]
    return f"{' `*`' if row.get('is_busy') else ''}" + "".join(f" | {c}" for c in cells) + " |"


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
