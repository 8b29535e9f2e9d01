"""Page of a report: sections of blocks, rendered to one self-contained HTML file.

Jinja escapes all texts of a run. The data of charts is JSON in a script element that browsers do
not run, with all characters escaped that could end the element.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from zero_engine.report.charts import Spec

_FIGURE = re.compile(r"[\d.,]+ [^\W\d]{1,2}")
"""Number with its unit. The page does not break such a cell."""


@dataclass(frozen=True)
class Text:
    """Paragraph."""

    text: str


@dataclass(frozen=True)
class Code:
    """Lines of a configuration or a program."""

    text: str


@dataclass(frozen=True, eq=False)
class Chart:
    """Vega-Lite specification of a chart."""

    spec: Spec


@dataclass(frozen=True)
class Table:
    """Table of texts."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Moves:
    """Proposed changes in order: mappings with the keys change, gain, paste and why."""

    moves: Sequence[Mapping[str, str]]


Block = Text | Code | Chart | Table | Moves
"""Part of a section. The template selects by class name."""


@dataclass(frozen=True)
class Verdict:
    """Head of a report: what limits the run, the evidence, figures, and all of it as a sentence.

    ``state`` is "good", "fair" or "poor".
    """

    title: str
    evidence: str
    facts: Mapping[str, str]
    state: str
    sentence: str


@dataclass(frozen=True)
class Page:
    """Contents of a report."""

    title: str
    verdict: Verdict
    first_move: Moves
    sections: Mapping[str, Sequence[Block]]
    footer: str = ""


def render(page: Page) -> str:
    import jinja2
    from markupsafe import Markup
    from vl_convert import javascript_bundle

    parts = [block for blocks in page.sections.values() for block in blocks]
    charts = [block for block in parts if isinstance(block, Chart)]
    # Bundle of Vega, Vega-Lite and Vega-Embed. vl_convert's types lack the argument's default.
    library: str = javascript_bundle()  # type: ignore[call-arg]
    assert "</script" not in library.lower(), "it could not stand within a script element"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.tests["figure"] = _FIGURE.fullmatch
    template = environment.from_string(_asset("page.html.j2"))
    # Escape all characters that could end the script element.
    text = json.dumps(
        _rounded([chart.spec for chart in charts]), separators=(",", ":"), allow_nan=False
    )
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return template.render(
        page=page,
        numbers={chart: number for number, chart in enumerate(charts)},
        charts=Markup(text),
        style=Markup(_asset("page.css")),
        script=Markup(_asset("page.js")),
        library=Markup(library),
    )


def _rounded(value: Any) -> Any:
    """Round floats in ``value`` to seven digits, to keep the page small."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return value


def _asset(name: str) -> str:
    return resources.files("zero_engine.report").joinpath(name).read_text(encoding="utf-8")
