"""Command-line options shared by several experiments."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.harness.models import GptShape

RESULTS = Path("integration/benchmarks/results")
HEAD_WIDTH = 64

Rounds = Annotated[int, typer.Option(min=1, help="Times that every contender runs.")]
Steps = Annotated[int, typer.Option(min=1, help="Timed steps per round.")]
Ranks = Annotated[list[int] | None, typer.Option(min=1, help="Ranks, on the CPU.")]
AllThreads = Annotated[int, typer.Option(min=0, help="For everyone; 0 for torch's count.")]
Sizes = Annotated[
    list[str] | None,
    typer.Option("--size", help="LAYERSxWIDTH of the GPT-2, the width a multiple of 64."),
]
Context = Annotated[int, typer.Option(min=2, help="Tokens per sample.")]
MicroBatch = Annotated[int, typer.Option(min=1, help="Samples per rank.")]
Output = Annotated[Path, typer.Option(help="Folder for the results, as JSON and pictures.")]


def of(names: Iterable[str], *options: str) -> Any:
    """Return an option that accepts some of ``names``. Without the option all names are chosen."""
    known = list(names)

    def check(given: list[str] | None) -> list[str]:
        for name in given or ():
            if name not in known:
                raise typer.BadParameter(f"unknown {name!r}; known: {', '.join(known)}")
        return list(dict.fromkeys(given or known))

    return typer.Option(*options, callback=check, help=f"Of: {', '.join(known)}; all by default.")


def use_threads(asked: int) -> int:
    """Set torch's number of threads and return it. 0 keeps the present number."""
    torch.set_num_threads(asked or torch.get_num_threads())
    return torch.get_num_threads()


def parse_size(size: str, *, vocab: int, context: int) -> GptShape:
    layers, _, width = size.partition("x")
    is_number = layers.isdigit() and width.isdigit() and int(layers) and int(width)
    if not is_number or int(width) % HEAD_WIDTH:
        raise typer.BadParameter(
            f"{size!r}: expected LAYERSxWIDTH, as 6x512, the width a multiple of {HEAD_WIDTH}",
            param_hint="--size",
        )
    heads = int(width) // HEAD_WIDTH
    return GptShape(int(layers), int(width), heads=heads, vocab=vocab, context=context)
