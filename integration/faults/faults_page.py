"""The results of ``nox -s faults`` and ``nox -s soak`` as a page of the documentation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
RESULTS = DOCS / "benchmarks" / "faults.json"
PAGE = DOCS / "faults.md"
Counts = dict[str, dict[str, list[int]]]
"""By what a file of tests is about, and by test: how many faults were tried, and how many held."""
HEAD = """# Injected faults

    nox -s faults
    nox -s faults -- -k checkpoint
    nox -s soak -- --minutes 20

Each test starts something that works, breaks it, and checks what must still hold. `nox -s faults`
writes this page from [its counts](benchmarks/faults.json). A run of a part (`-k`) keeps the counts
of the others.
"""


def read() -> dict[str, Any]:
    """Return what was written before: "tests", "beside" and "soak"."""
    if not RESULTS.exists():
        return {}
    return dict(json.loads(RESULTS.read_text(encoding="utf-8")))


def write(part: str, content: Any) -> None:
    """Replace a part of the results, and write the page."""
    found = {**read(), part: content}
    RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(page(read()), encoding="utf-8")


def update(found: Counts, collected: Collection[str]) -> None:
    """Write the counts of a run, which could have run the tests ``collected``.

    Those of the others stay, if their files are still there.
    """
    files = {test.partition("::")[0] for test in collected}

    def exists(test: str) -> bool:
        file = test.partition("::")[0]
        return test in collected if file in files else HERE.joinpath(file).exists()

    merged: Counts = {}
    for counts in (read().get("tests", {}), found):
        for what, tests in counts.items():
            kept = {test: pair for test, pair in tests.items() if exists(test)}
            if kept:
                merged.setdefault(what, {}).update(kept)
    write("tests", merged)


def total(pairs: Iterable[Sequence[int]]) -> list[int]:
    """Return how many faults were tried and how many held, over ``pairs`` of both."""
    return [sum(column) for column in zip((0, 0), *pairs, strict=True)]


def page(found: Mapping[str, Any]) -> str:
    """Return the whole page."""
    lines = [HEAD, *_tests(found.get("tests", {})), *_beside(found.get("beside", {}))]
    return "\n".join([*lines, *_soak(found.get("soak", {}))])


def _tests(counts: Counts) -> list[str]:
    tried, held = total(pair for tests in counts.values() for pair in tests.values())
    lines = [f"**{held:,} of {tried:,} faults held.**\n"]
    for what, tests in sorted(counts.items()):
        lines += [f"## {what}\n", "| | tried | held |", "|---|---:|---:|"]
        by_sentence: dict[str, list[list[int]]] = {}
        for test, pair in tests.items():
            sentence = test.partition("::test_")[2].partition("[")[0].replace("_", " ")
            by_sentence.setdefault(sentence, []).append(pair)
        for sentence, own in sorted(by_sentence.items()):
            a, b = total(own)
            if not a:
                continue
            lines.append(f"| {sentence} | {a:,} | {f'{b:,}' if a == b else f'**{b:,}**'} |")
        lines.append("")
    return lines


OUTCOMES = {
    "refused": "refused",
    "error": "error without the file",
    "written": "...already written",
    "harmless": "harmless",
    "hangs": "hangs or dies",
    "wrong": "**wrong, unnoticed**",
}
BESIDE = """## Beside torch.distributed.checkpoint and DeepSpeed

One training (two linear layers, AdamW, two gloo ranks) under three kinds of checkpoints:
zero-core's at stage 2, `torch.distributed.checkpoint` with FSDP2, and DeepSpeed 0.19.8's at stage
2. Each fault changes a copy of the files or interrupts a save. Then both ranks load.

- *refused*: an error that names the file, the tag or the folder.
- *error without the file*: any other error.
- *already written*: how many of both errors came after weights or states in memory were changed.
- *harmless*: the loaded state is bit for bit the saved one. After an interrupted save, the state of
  the save before counts as well. An error then means that neither of them can be loaded.
- *hangs or dies*: no answer in 15 s, or the process died.
- *wrong, unnoticed*: the load returns, but weights, moments, counters or the user's own state are
  not the saved ones, or a program in the file was run.

zero-core promises that a checkpoint is whole or refused. torch writes `.metadata` last and warns
before it overwrites a checkpoint. Its documentation says that objects other than tensors are read
by `torch.load`, so they are unpickled. DeepSpeed documents that `load_checkpoint` returns None if
loading failed, which counts as refused here. Its files are unpickled. Neither documents checksums,
nor that a save under an existing name keeps the previous checkpoint until it is complete. A file
system with checksums would detect changed bytes for all three.
"""


def _beside(found: Mapping[str, Mapping[str, Mapping[str, int]]]) -> list[str]:
    if not found:
        return []
    lines = [BESIDE, "| what happens | to | " + " | ".join(OUTCOMES.values()) + " |"]
    lines.append("|---|---|" + "---:|" * len(OUTCOMES))
    totals: dict[str, Counter[str]] = {}
    rows = list(dict.fromkeys(row for side in found.values() for row in side))
    for row in rows:
        for name, side in sorted(found.items(), key=_ours_first):
            if row in side:
                lines.append(f"| {row} | {name} | {_outcomes(side[row])} |")
                totals.setdefault(name, Counter()).update(side[row])
    for name, counts in totals.items():
        lines.append(f"| **all** | {name} | {_outcomes(counts)} |")
    return [*lines, ""]


def _ours_first(side: tuple[str, object]) -> tuple[bool, str]:
    return side[0] != "zero-core", side[0]


def _outcomes(counts: Mapping[str, int]) -> str:
    return " | ".join(str(counts.get(outcome) or "") for outcome in OUTCOMES)


SOAK = """## Random kills

`zero-engine train` trains a tiny GPT-2 for 60 steps with `"world_size_invariant": true`. For each
run a stage, a share of offloaded optimizer states and an interval between checkpoints are drawn;
each of its launches has 1, 2 or 4 ranks. A fault hits a launch at a random step or during its
start. The run then continues with `--resume auto`, or by `--max-restarts`. Its final weights are
compared with those of an undisturbed run on one rank. `--seed` repeats the same draws.
"""


def _soak(found: Mapping[str, Any]) -> list[str]:
    if not found:
        return []
    counted = dict(found)
    faults = counted.pop("faults")
    seed, minutes = counted.pop("seed"), counted.pop("minutes")
    lines = [SOAK, f"Seed {seed}, {minutes} minutes:\n", "| counted | |", "|---|---:|"]
    lines += [f"| {what} | {count} |" for what, count in counted.items()]
    lines += [f"| {what} | {count} |" for what, count in sorted(faults.items())]
    return [*lines, ""]


if __name__ == "__main__":
    PAGE.write_text(page(read()), encoding="utf-8")
