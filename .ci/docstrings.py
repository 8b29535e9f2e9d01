"""Counts docstrings whose first line is a fragment: ``python .ci/docstrings.py [PATH ...]``.

A first line is an imperative sentence (functions) or a noun phrase (classes, modules, properties).
Three marks tell that it is not: it begins like a relative clause or a fragment ("What ...",
"Whose ...", "Of ..."), it chains two facts by a semicolon, or it uses a homely verb for a technical
one ("tell", "lie", "come", "look", "let go"). The exit code is 1 if `MAX_SHARE` or more of
the first lines have a mark.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

MAX_SHARE = 0.03
FOLDERS = (
    "packages/cpu-adam/src",
    "packages/zero-comm/src",
    "packages/zero-core/src",
    "packages/zero-offload/src",
    "integration/src",
    "integration/benchmarks",
)
FRAGMENT = re.compile(
    r"(What|Whose|Who|Whom|Where|How|When|Which|That|Those|Of|So|Such|Because|But|And|Or|Not|There"
    r"|Its|Their|Whatever|Whoever|After|Before|By|From|Beside|Within|Without|As|If|On)\b"
)
HOMELY = re.compile(
    r"\b(tells?|told|telling|lies?|lay|lying|comes?|came|coming|looks?|looked|lets? go"
    r"|gives? back|given back|gave back|takes? over|hears?)\b",
    re.IGNORECASE,
)


def find_marks(line: str) -> list[str]:
    """Name the marks of a docstring's first line."""
    marks = []
    if FRAGMENT.match(line):
        marks.append("fragment")
    if ";" in line:
        marks.append("two facts")
    if HOMELY.search(line):
        marks.append("homely verb")
    return marks


def read_first_lines(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield ("path:line", first line) of every docstring below ``folder``."""
    for path in sorted(folder.rglob("*.py") if folder.is_dir() else [folder]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                description = ast.get_docstring(node)
                if description:
                    place = getattr(node, "lineno", 1)  # a module has none
                    yield f"{path}:{place}", description.split("\n")[0]


def main(arguments: Sequence[str]) -> int:
    """Print every marked first line, and the share of them."""
    root = Path(__file__).parents[1]
    folders = [Path(a) for a in arguments] or [root / f for f in FOLDERS if (root / f).exists()]
    lines = [line for folder in folders for line in read_first_lines(folder)]
    marked = [(place, text, find_marks(text)) for place, text in lines if find_marks(text)]
    for place, text, marks in marked:
        print(f"{place}: {', '.join(marks)}: {text}")
    share = len(marked) / max(len(lines), 1)
    print(
        f"{len(marked)} of {len(lines)} first lines ({share:.1%}); fewer than {MAX_SHARE:.0%} pass"
    )
    return int(share >= MAX_SHARE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
