"""``--local_rank=N``, which DeepSpeed's launcher puts before the arguments of every script.

A script that doesn't declare the option ends at it. So here only one that does is given it: the
script itself, or a module in its folder that it imports, has the string ``"--local_rank"`` in its
code. Scripts of Hugging Face's Trainer don't: they find their rank in the environment.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["OPTION", "declares_local_rank", "source_of"]

OPTION = "--local_rank"


def source_of(program: str, *, is_module: bool) -> Path | None:
    """The file that ``python program``, or ``python -m program``, runs; None: it isn't Python's."""
    if not is_module:
        path = Path(program)
        return path if path.is_file() else None
    inner = Path(*program.split("."))
    files = (inner.with_suffix(".py"), inner / "__main__.py")
    folders = (Path.cwd(), *(Path(entry) for entry in sys.path if entry))
    return next((f / file for f in folders for file in files if (f / file).is_file()), None)


def declares_local_rank(script: Path) -> bool:
    """Whether ``script``, or what it imports from its own folder, names `OPTION` in its code."""
    seen: set[Path] = set()
    left = [script]
    while left:
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # Python itself will tell
        if any(isinstance(node, ast.Constant) and node.value == OPTION for node in ast.walk(tree)):
            return True
        left += _beside(script.parent, _imported(tree))
    return False


def _imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names that may be modules; of relative ones, as if from the script's folder."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = f"{node.module}." if node.module else ""
            yield from ([node.module] if node.module else [])
            yield from (f"{base}{alias.name}" for alias in node.names)


def _beside(folder: Path, names: Iterator[str] | Sequence[str]) -> list[Path]:
    inner = [folder / Path(*name.split(".")) for name in names if name != "*"]
    files = [file for at in inner for file in (at.with_name(f"{at.name}.py"), at / "__init__.py")]
    return [file for file in files if file.is_file()]
