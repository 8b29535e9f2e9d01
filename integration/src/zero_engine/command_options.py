"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Text = str | None
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def option(help_text: str) -> Any:
    return typer.Option(help=help_text, show_default=False)
