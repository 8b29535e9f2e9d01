"""Check of the first lines of docstrings: ``python .ci/docstrings.py [PATH ...]``.

A first line should be an imperative sentence (functions) or a noun phrase (classes, modules,
properties). Three marks indicate a bad one: it begins like a relative clause or a fragment ("What
...", "Of ..."), it joins two facts by a semicolon, or it uses a homely verb ("tell", "lie", "come")
instead of a technical one.

Exported classes, their public methods and exported functions need docstrings, overrides excepted.
The exit code is 1 if one is missing, or if a folder's share of marked lines reaches `MAX_SHARE`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

MAX_SHARE = 0.03
FOLDERS = ("packages/*/src", "integration/src", "integration/benchmarks", "*/*/tests", "*/tests")
DOCUMENTED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
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
    """Return the marks of a docstring's first line."""
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
            if isinstance(node, (ast.Module, *DOCUMENTED)):
                description = ast.get_docstring(node)
                if description:
                    place = getattr(node, "lineno", 1)  # a module has no lineno
                    yield f"{path}:{place}", description.split("\n")[0]


def find_undocumented(source: Path) -> Iterator[str]:
    """Yield exports of the package at ``source`` that have no docstring."""
    top = ast.parse((source / "__init__.py").read_text(encoding="utf-8"))
    exported = {a.name for n in ast.walk(top) if isinstance(n, ast.ImportFrom) for a in n.names}
    for path in source.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, DOCUMENTED) and node.name in exported:
                for part in (node, *(node.body if isinstance(node, ast.ClassDef) else ())):
                    if isinstance(part, DOCUMENTED) and _lacks_docstring(part):
                        yield f"{path}:{part.lineno}: {part.name} is public and has no docstring"


def _lacks_docstring(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    marks = {ast.unparse(d).split(".")[-1] for d in node.decorator_list}
    is_public = not node.name.startswith("_") and not marks & {"override", "overload", "setter"}
    return is_public and not ast.get_docstring(node)


def main(arguments: Sequence[str]) -> int:
    """Print marked first lines, exports without a docstring, and the share of marked lines."""
    folders = [path for name in arguments or FOLDERS for path in sorted(Path().glob(name))]
    is_bad = False
    for folder in folders:
        lines = list(read_first_lines(folder))
        marked = [(place, text, find_marks(text)) for place, text in lines if find_marks(text)]
        for place, text, marks in marked:
            print(f"{place}: {', '.join(marks)}: {text}")
        missing = [m for top in folder.glob("*/__init__.py") for m in find_undocumented(top.parent)]
        print(*missing, sep="\n", end="\n" if missing else "")
        share = len(marked) / max(len(lines), 1)
        print(f"{folder}: {len(marked)} of {len(lines)} first lines ({share:.1%})")
        is_bad |= share >= MAX_SHARE or bool(missing)
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
