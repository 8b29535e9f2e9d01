"""Check of the source: ``python .ci/structure.py [ROOT]``. `imports.toml` has the import rules.

The rules for the source of every package:

- ``getattr(x, "name", default)`` or ``hasattr(x, "name")`` must not replace a declared protocol,
  unless the object belongs to another project. A comment ``# foreign:`` then names the owner.
- No file reads a private attribute of another file's class.
- zero-core's functions have, in total, at most `MAX_CALLABLES` parameters of type ``Callable``.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

MAX_CALLABLES = 20
SOURCES = {
    "cpu_adam": "packages/cpu-adam/src",
    "zero_comm": "packages/zero-comm/src",
    "zero_core": "packages/zero-core/src",
    "zero_offload": "packages/zero-offload/src",
    "zero_engine": "integration/src",
    "benchmarks": "integration",
    "faults": "integration",
}
# Private attributes of torch's classes whose names also occur in this repository.
TORCH_PRIVATES = {"_base", "_buffers", "_parameters", "_modules", "_version", "_opt_called"}


@dataclass
class Module:
    """A source file: its dotted name and syntax tree."""

    name: str
    path: Path
    tree: ast.Module


def read_modules(root: Path) -> dict[str, Module]:
    """Read the source files of the repository at ``root``, by dotted name."""
    modules: dict[str, Module] = {}
    for package, folder in SOURCES.items():
        for path in sorted((root / folder / package).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules[name] = Module(name, path, ast.parse(path.read_text(encoding="utf-8")))
    return modules


def find_capability_probes(modules: dict[str, Module]) -> list[str]:
    """Find calls of ``getattr`` with a default, or ``hasattr``, that replace a protocol."""
    found = []
    for module in modules.values():
        lines = module.path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(module.tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            is_probe = (node.func.id, len(node.args)) in {("getattr", 3), ("hasattr", 2)}
            if not is_probe or not isinstance(node.args[1], ast.Constant):
                continue
            if ast.unparse(node.args[0]) == "self":
                continue  # the class's own attribute
            if _root_name(node.args[0]) in _imported_names(module):
                continue  # tests for a feature of an imported library
            around = "\n".join(lines[max(0, node.lineno - 3) : (node.end_lineno or node.lineno)])
            if "# foreign:" not in around:
                found.append(f"{module.path}:{node.lineno}: {ast.unparse(node)}")
    return found


def _root_name(node: ast.expr) -> str | None:
    """Return the name that an expression such as ``a.b(c).d`` starts with."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return None
    return node.id


def _imported_names(module: Module) -> set[str]:
    """Return the names that a module's imports bind."""
    nodes = [n for n in ast.walk(module.tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    return {(a.asname or a.name).split(".")[0] for n in nodes for a in n.names}


def find_foreign_privates(modules: dict[str, Module]) -> list[str]:
    """Find uses of this repository's private attributes in files that do not define them."""
    private = re.compile(r"_[a-z]\w*$")
    defined_somewhere = {name for m in modules.values() for name in _defined_privates(m)}
    found = []
    for module in modules.values():
        own = _defined_privates(module)
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Attribute) or not private.match(node.attr):
                continue
            is_self = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
            is_ours = node.attr in defined_somewhere - TORCH_PRIVATES
            if not is_self and node.attr not in own and is_ours:
                found.append(f"{module.path}:{node.lineno}: {ast.unparse(node)}")
    return found


def _defined_privates(module: Module) -> set[str]:
    names = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if ast.unparse(node.value) in {"self", "cls"} else set()
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def find_callable_parameters(modules: dict[str, Module]) -> list[str]:
    """Find parameters of zero-core's functions that are annotated with ``Callable``."""
    found = []
    own = [m for m in modules.values() if re.match(r"zero_core(?!\.testing)", m.name)]
    aliases = {"Callable"} | {
        ast.unparse(node.targets[0])
        for module in own
        for node in module.tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Callable[")
    }
    words = re.compile(rf"\b({'|'.join(sorted(aliases))})\b")
    for module in own:
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            found += [
                f"{module.path}:{node.lineno}: {node.name}({a.arg}: {ast.unparse(a.annotation)})"
                for a in arguments
                if a.annotation is not None and words.search(ast.unparse(a.annotation))
            ]
    return found


CHECKS = {
    "capability probes": find_capability_probes,
    "private attributes of another file's class": find_foreign_privates,
}


def main(root: Path) -> int:
    """Print violations of the rules. The exit code is 1 if there are any."""
    modules = read_modules(root)
    failures = 0
    for title, check in CHECKS.items():
        found = check(modules)
        failures += len(found)
        print(f"{title}: {len(found)}", *found, sep="\n  ")
    callables = find_callable_parameters(modules)
    print(f"Callable parameters of zero-core: {len(callables)} (at most {MAX_CALLABLES})")
    if len(callables) > MAX_CALLABLES:
        print(*callables, sep="\n  ")
    return int(bool(failures) or len(callables) > MAX_CALLABLES)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1])))
