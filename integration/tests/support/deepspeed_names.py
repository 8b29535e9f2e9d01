"""The public names of DeepSpeed's modules, read from its source without importing it."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

from zero_engine.deepspeed.served import ALIASES

HOME = Path(__file__).parents[2] / "src" / "zero_engine"


@cache
def served_modules() -> list[str]:
    """List the served modules by dotted names without "deepspeed.", where "" is the package."""
    root = HOME / "deepspeed"
    return sorted({*ALIASES, *(_dotted(path, root) for path in root.rglob("*.py"))})


def deepspeeds_folder() -> Path | None:
    spec = importlib.util.find_spec("deepspeed")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def public_names(root: Path) -> dict[str, list[str]]:
    """Map each module that DeepSpeed and the stand-in share to its public names in DeepSpeed."""
    found = {name: _file(root, name) for name in served_modules()}
    return {
        name: sorted(n for n in _names(root, file) if not _is_module(root, name, n))
        for name, file in found.items()
        if file is not None
    }


def _dotted(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _file(root: Path, dotted: str) -> Path | None:
    at = root.joinpath(*filter(None, dotted.split(".")))
    files = (at / "__init__.py", at.with_name(f"{at.name}.py"))
    return next((file for file in files if file.is_file()), None)


def _is_module(root: Path, package: str, name: str) -> bool:
    dotted = f"{package}.{name}".strip(".")
    return _file(root, dotted) is not None or dotted in served_modules()


@cache
def _names(root: Path, file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_bytes())
    found: set[str] = set()
    for node in _at_the_top(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.ImportFrom):
            found |= _passed_on(root, file, node)
    # ``op_builder`` collects the builders of its modules at run time.
    if file.parent.name == "op_builder" and file.stem == "__init__":
        others = [_names(root, other) for other in file.parent.glob("*.py") if other != file]
        found |= {name for names in others for name in names if name.endswith("Builder")}
    return frozenset(name for name in found if not name.startswith("_"))


def _at_the_top(tree: ast.AST) -> list[ast.AST]:
    found: list[ast.AST] = []
    left = list(ast.iter_child_nodes(tree))
    while left:
        node = left.pop()
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            left += ast.iter_child_nodes(node)
        else:
            found.append(node)
    return found


def _passed_on(root: Path, file: Path, node: ast.ImportFrom) -> set[str]:
    if node.level:
        base = file.parents[node.level - 1]
        dotted = ".".join(base.relative_to(root).parts)
        source = f"{dotted}.{node.module}".strip(".") if node.module else dotted
    elif node.module and f"{node.module}.".startswith("deepspeed."):
        source = node.module.removeprefix("deepspeed").strip(".")
    else:
        return set()
    names = {alias.asname or alias.name for alias in node.names}
    if "*" in names:
        other = _file(root, source)
        names = (names - {"*"}) | (set(_names(root, other)) if other else set())
    return names
