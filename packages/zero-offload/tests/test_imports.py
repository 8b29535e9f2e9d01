"""The package's own imports: folders in layers, no circle, no sibling package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import zero_offload

SOURCE = Path(zero_offload.__file__).parent
LAYERS = [
    {"errors", "protocols", "threads"},
    {"settings", "flat", "memory"},
    {"rules"},
    {"transfers"},
    {"steppers"},
    {"tiers", "local_parts"},
    {"tier", "param_tier", "testing"},
    {"optimizer", "footprint"},
    {"__init__"},
]
"""Folders and files on top, each above those that it imports."""


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _layer_of(name: str) -> int:
    (found,) = (i for i, names in enumerate(LAYERS) if name in names)
    return found


def test_every_import_goes_down_or_stays_in_its_folder() -> None:
    for path in SOURCE.rglob("*.py"):
        own = path.relative_to(SOURCE).with_suffix("").parts[0]
        for module in _imports(path):
            package, _, rest = module.partition(".")
            assert package not in {"zero_core", "zero_comm", "cpu_adam"}, (path, module)
            if package == "zero_offload" and rest and rest.split(".")[0] != own:
                assert _layer_of(rest.split(".")[0]) < _layer_of(own), (path, module)
