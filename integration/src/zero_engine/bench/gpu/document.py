"""The results of this program as Markdown: what the documentation says of accelerators.

python -m zero_engine.bench.gpu.document integration/benchmarks/results
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from zero_engine.bench.gpu.__main__ import PARTS
from zero_engine.bench.gpu.part import Part
from zero_engine.bench.gpu.results import Results, has_figures

__all__ = ["document"]


def document(results: Results) -> str:
    """A section per part that was measured, with when, where and of what; nothing without results.

    Parts of a dry run are left out: their figures say nothing of an accelerator.
    """
    sections = []
    for part in PARTS:
        found = results.parts.get(part.name)
        if found is not None and not found["measured"]["is_dry_run"]:
            sections.append("\n".join(_section(part, found)))
    return "\n".join(sections)


def _section(part: Part, found: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {part.name}: {part.about}"
    yield ""
    yield _provenance(found["measured"])
    yield ""
    if has_figures(found):
        table = part.table(found)
        yield from _lines(table)
        yield ""
        if table.caption:
            yield f"{table.caption}"
            yield ""
    for name, row in found["rows"].items():
        for kind in ("failure", "skipped"):
            if kind in row:
                yield f"- {name}: {kind}: {row[kind]}"
    yield ""


def _provenance(measured: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in measured["versions"].items() if v)
    return (
        f"{measured['date'][:10]}, commit {measured['commit']}: {measured['device']}, driver "
        f"{measured['driver']}; {measured['cores']} cores of {measured['processor']}; {versions}."
    )


def _lines(table: Table) -> Iterator[str]:
    """A table of text as Markdown's."""
    yield _line([str(column.header) for column in table.columns])
    yield _line(["---:" if column.justify == "right" else "---" for column in table.columns])
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    for row in zip(*cells, strict=True):
        yield _line(row)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the document of the folder that is named."""
    (folder,) = sys.argv[1:]
    if not Path(folder, "gpu.json").exists():
        sys.exit(f"{folder} has no gpu.json: run python -m zero_engine.bench.gpu --out {folder}")
    print(document(Results(Path(folder))), end="")


if __name__ == "__main__":
    main()
