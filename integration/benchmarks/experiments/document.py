"""The results of `gpu` as Markdown, for the documentation."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.experiments.gpu.program import PARTS
from benchmarks.experiments.gpu.results import Results, document


def main(folder: Path) -> None:
    """Print the document of ``gpu.json`` in a folder."""
    if not (folder / "gpu.json").exists():
        command = f"python integration/benchmarks/run.py gpu --out {folder}"
        sys.exit(f"{folder} has no gpu.json: run {command}")
    print(document(Results(folder), PARTS), end="")
