"""``--local_rank=N``, which DeepSpeed's launcher puts before the arguments of every script.

A script that doesn't declare the option ends at it. So here only one that does is given it: the
script itself, or a module that it imports from where it lies, has the string ``"--local_rank"`` in
its code, or a dataclass with the field ``local_rank`` beside the name of `HfArgumentParser`, which
makes options of fields. Scripts of Hugging Face's Trainer don't: they find their rank in the
environment. Folders that a script puts on sys.path itself are not searched, and of the folder that
``-m`` finds an installed module in, only the package that it is in.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

OPTION = "--local_rank"
PARSER_OF_FIELDS = "HfArgumentParser"


class Source(NamedTuple):
    """Location of a program's code."""

    file: Path
    folder: Path
    """Where Python looks first for what the program imports."""
    package: str | None = None
    """Of what lies there, the package that the program is in; None: all of it is the program's."""


def source_of(program: str, *, is_module: bool) -> Source | None:
    """Return the code that ``python program`` or ``python -m program`` runs, else None."""
    if not is_module:
        path = Path(program)
        return Source(path, path.parent) if path.is_file() else None
    inner = Path(*program.split("."))
    files = (inner.with_suffix(".py"), inner / "__main__.py")
    installed = [folder for entry in sys.path if (folder := Path(entry).absolute()) != Path.cwd()]
    places = [Source(Path.cwd() / file, Path.cwd()) for file in files]
    places += [Source(f / file, f, inner.parts[0]) for f in installed for file in files]
    return next((place for place in places if place.file.is_file()), None)


def declares(source: Source, option: str) -> bool:
    """Whether the program, or what it imports from its own folder, declares ``option``."""
    field = option.lstrip("-")
    seen: set[Path] = set()
    left = [source.file]
    has_field = has_parser_of_fields = False
    while left:
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # Python itself will tell
        nodes = list(ast.walk(tree))
        has_field |= any(_is_field(node, field) for node in nodes)
        has_parser_of_fields |= any(
            (isinstance(node, ast.Attribute) and node.attr == PARSER_OF_FIELDS)
            or (isinstance(node, ast.Name) and node.id == PARSER_OF_FIELDS)
            for node in nodes
        )
        is_named = any(isinstance(node, ast.Constant) and node.value == option for node in nodes)
        if is_named or (has_field and has_parser_of_fields):
            return True
        for node in nodes:
            left += _imported(node, path, source)
    return False


def _is_field(node: ast.AST, field: str) -> bool:
    """Whether ``node`` is a dataclass with the field."""
    if not isinstance(node, ast.ClassDef):
        return False
    decorators = [ast.unparse(one).partition("(")[0] for one in node.decorator_list]
    return any(name.endswith("dataclass") for name in decorators) and any(
        isinstance(one, ast.AnnAssign) and ast.unparse(one.target) == field for one in node.body
    )


def _imported(node: ast.AST, importer: Path, source: Source) -> Iterator[Path]:
    """Files of the program's modules that ``node``, a statement in ``importer``, may import."""
    folder = source.folder
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        module = [node.module] if node.module else []
        names = [".".join([*module, alias.name]) for alias in node.names]
    else:
        return
    if isinstance(node, ast.ImportFrom) and node.level:
        # relative: the package that the importer is in has been run, too
        folder = next(iter(importer.absolute().parents[node.level - 1 :]), folder)
        yield folder / "__init__.py"
    elif source.package is not None:
        names = [name for name in names if name.partition(".")[0] == source.package]
    for dotted in names:
        place = folder
        for name in dotted.split("."):  # the module, and its packages
            yield place / f"{name}.py"
            place = place / name
            yield place / "__init__.py"
