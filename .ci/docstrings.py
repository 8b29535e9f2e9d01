"""Counts docstrings whose first line is a fragment: ``python .ci/docstrings.py [PATH ...]``.

A first line is an imperative sentence (functions) or a noun phrase (classes, modules, properties).
Three marks tell that it is not: it begins like a relative clause or a fragment ("What ...",
"Whose ...", "Of ..."), it chains two facts by a semicolon, or it uses a homely verb for a technical
one ("tell", "lie", "come", "look", "let go").

What a package exports at its top must have docstrings, with every public method. Elsewhere a
function whose name says it needs none. The exit code is 1 if an exported name has none, or if
`MAX_SHARE` or more of the first lines have a mark.
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


def find_undocumented(source: Path) -> Iterator[str]:
    """Yield the names that the package at ``source`` exports at its top without a docstring."""
    for node in ast.parse((source / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            path = source.parent.joinpath(*node.module.split("."))
            path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            names = {alias.name for alias in node.names}
            if path.exists():
                for found in ast.parse(path.read_text(encoding="utf-8")).body:
                    if isinstance(found, _DOCUMENTED) and found.name in names:
                        yield from _undocumented_parts(path, found)


_DOCUMENTED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_SAYS_IT_ELSEWHERE = {"override", "overload", "setter"}


def _undocumented_parts(path: Path, node: ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    decorators = [d.attr if isinstance(d, ast.Attribute) else d for d in node.decorator_list]
    names = {d.id if isinstance(d, ast.Name) else d for d in decorators}
    if not ast.get_docstring(node) and not names & _SAYS_IT_ELSEWHERE:
        yield f"{path}:{node.lineno}: {node.name} is public and has no docstring"
    if isinstance(node, ast.ClassDef):
        for part in node.body:
            if isinstance(part, _DOCUMENTED) and not part.name.startswith("_"):
                yield from _undocumented_parts(path, part)


def main(arguments: Sequence[str]) -> int:
    """Print every marked first line, and the share of them."""
    root = Path(__file__).parents[1]
    folders = [Path(a) for a in arguments] or [root / f for f in FOLDERS if (root / f).exists()]
    lines = [line for folder in folders for line in read_first_lines(folder)]
    marked = [(place, text, find_marks(text)) for place, text in lines if find_marks(text)]
    for place, text, marks in marked:
        print(f"{place}: {', '.join(marks)}: {text}")
    missing = [
        name
        for folder in folders
        for top in folder.glob("*/__init__.py")
        for name in find_undocumented(top.parent)
    ]
    print(*missing, sep="\n", end="\n" if missing else "")
    share = len(marked) / max(len(lines), 1)
    print(
        f"{len(marked)} of {len(lines)} first lines ({share:.1%}); fewer than {MAX_SHARE:.0%} pass"
    )
    return int(share >= MAX_SHARE or bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
