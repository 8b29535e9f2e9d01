"""Checks the structure of the source by reading it: ``python .ci/structure.py [ROOT]``.

Rules, for the source of every package:

- at most `MAX_FILES` Python files lie side by side in one folder;
- the imports between the entries of a folder (files, and subfolders taken as one) have no cycle and
  at most `MAX_LEVELS` levels, so that no file imports what is built on top of it;
- the folders of zero-core import only what `MAY_IMPORT` grants;
- no ``getattr(x, "name", default)`` or ``hasattr(x, "name")`` stands in for a declared protocol,
  except where the object belongs to another project (a comment ``# foreign:`` says whose);
- no file reads a private attribute of a class of another file;
- no ``if TYPE_CHECKING`` import of the engine;
- zero-core's signatures have at most `MAX_CALLABLES` parameters of type ``Callable``.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MAX_FILES = 14
MAX_LEVELS = 8
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
# Attributes of torch's own classes, whose names some class here shares.
TORCH_PRIVATES = {"_base", "_buffers", "_parameters", "_modules", "_version", "_opt_called"}
# Folder of zero-core: the folders it may import. Files at the top, ``errors``, ``protocols`` and
# ``_torch`` among them, are held by the rule against cycles.
MAY_IMPORT = {
    "config": set[str](),
    "core": set[str](),
    "layout": set[str](),
    "watch": set(),
    "comm": {"layout", "watch"},
    "sharded": {"core", "watch", "comm", "layout", "config"},
    "tiled": {"layout", "config"},
    "runtime": {"core", "watch", "tiled", "sharded", "comm", "layout", "config"},
    "optim": {"core", "config", "layout", "comm"},
    "step": {"core", "watch", "runtime", "optim", "sharded", "comm", "layout", "config"},
    "vertical": {"runtime", "optim", "sharded", "comm", "layout", "config"},
    "checkpoint": {"core", "sharded", "optim", "step", "comm", "layout", "config"},
    "init": {"core", "layout", "comm", "sharded"},
    "record": {"watch", "step", "optim", "sharded", "comm", "layout", "config"},
    "plan": {
        "init",
        "checkpoint",
        "step",
        "runtime",
        "tiled",
        "optim",
        "sharded",
        "comm",
        "layout",
        "config",
    },
}


@dataclass
class Module:
    """One source file: its dotted name, its syntax tree, and the modules it imports."""

    name: str
    path: Path
    tree: ast.Module
    imports: set[str] = field(default_factory=set)


def read_modules(root: Path) -> dict[str, Module]:
    """Read all source files below ``root``, the root of the repository, by dotted name."""
    modules: dict[str, Module] = {}
    for package, folder in SOURCES.items():
        for path in sorted((root / folder / package).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules[name] = Module(name, path, ast.parse(path.read_text(encoding="utf-8")))
    for module in modules.values():
        module.imports = set(_imports(module, modules)) - {module.name}
    return modules


def _imports(module: Module, modules: dict[str, Module]) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in modules:
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in modules:
                    yield full
                elif node.module in modules:
                    yield node.module


def find_crowded_folders(modules: dict[str, Module]) -> list[str]:
    """Folders with more than `MAX_FILES` Python files side by side."""
    count: dict[Path, int] = {}
    for module in modules.values():
        count[module.path.parent] = count.get(module.path.parent, 0) + 1
    return [f"{folder}: {n} files" for folder, n in count.items() if n > MAX_FILES]


def find_import_tangles(modules: dict[str, Module]) -> list[str]:
    """Cycles between the entries of a folder, and folders of more than `MAX_LEVELS` levels."""
    found = []
    packages = {m.name for m in modules.values() if m.path.name == "__init__.py"}
    for package in sorted(packages):
        edges: dict[str, set[str]] = {}
        why: dict[tuple[str, str], str] = {}
        for module in modules.values():
            here = _entry(module.name, package)
            if here is None:
                continue
            edges.setdefault(here, set())
            for target in module.imports:
                there = _entry(target, package)
                if there is not None and there != here:
                    edges[here].add(there)
                    why.setdefault((here, there), f"{module.name} -> {target}")
        cycle = _find_cycle(edges)
        if cycle:
            pairs = itertools.pairwise(cycle)
            found.append(f"{package}: cycle " + "; ".join(why[pair] for pair in pairs))
            continue
        levels = _count_levels(edges)
        if levels > MAX_LEVELS:
            found.append(f"{package}: {levels} levels")
    return found


def _entry(name: str, package: str) -> str | None:
    """The entry of ``package``'s folder that module ``name`` belongs to."""
    if not name.startswith(package + "."):
        return None
    return name[len(package) + 1 :].split(".")[0]


def _find_cycle(edges: dict[str, set[str]]) -> list[str] | None:
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        done.add(node)
        for target in sorted(edges.get(node, ())):
            cycle = visit(target, [*path, node])
            if cycle:
                return cycle
        return None

    for node in sorted(edges):
        cycle = visit(node, [])
        if cycle:
            return cycle
    return None


def _count_levels(edges: dict[str, set[str]]) -> int:
    levels: dict[str, int] = {}

    def level(node: str) -> int:
        if node not in levels:
            levels[node] = 1 + max((level(target) for target in edges.get(node, ())), default=0)
        return levels[node]

    return max((level(node) for node in edges), default=0)


def find_forbidden_imports(modules: dict[str, Module]) -> list[str]:
    """Imports between zero-core's folders that `MAY_IMPORT` does not grant."""
    found = []
    for module in modules.values():
        parts = module.name.split(".")
        if parts[0] != "zero_core" or len(parts) < 2 or parts[1] not in MAY_IMPORT:
            continue
        for target in sorted(module.imports):
            to = target.split(".")
            is_folder = to[0] == "zero_core" and len(to) > 2
            if is_folder and to[1] != parts[1] and to[1] not in MAY_IMPORT[parts[1]]:
                found.append(f"{module.name} -> {target}")
    return found


def find_capability_probes(modules: dict[str, Module]) -> list[str]:
    """Calls of ``getattr`` with a default, or ``hasattr``, of a constant name."""
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
                continue  # an own attribute
            if _root_name(node.args[0]) in _imported_names(module):
                continue  # which release of a library this is
            around = "\n".join(lines[max(0, node.lineno - 3) : (node.end_lineno or node.lineno)])
            if "# foreign:" not in around:
                found.append(f"{module.path}:{node.lineno}: {ast.unparse(node)}")
    return found


def _root_name(node: ast.expr) -> str | None:
    """The name that an expression such as ``a.b(c).d`` starts with."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return None
    return node.id


def _imported_names(module: Module) -> set[str]:
    """Names that a module's imports bind."""
    nodes = [n for n in ast.walk(module.tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    return {(a.asname or a.name).split(".")[0] for n in nodes for a in n.names}


def find_foreign_privates(modules: dict[str, Module]) -> list[str]:
    """Reads of an attribute ``x._name`` that this file defines nowhere."""
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


def find_engine_imports_for_types(modules: dict[str, Module]) -> list[str]:
    """Imports of the engine under ``if TYPE_CHECKING``."""
    found = []
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                found += [
                    f"{module.path}:{inner.lineno}: {ast.unparse(inner)}"
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.ImportFrom)
                    and any(alias.name.endswith("Engine") for alias in inner.names)
                ]
    return found


def find_callable_parameters(modules: dict[str, Module]) -> list[str]:
    """Parameters of zero-core's functions that are annotated with ``Callable``."""
    found = []
    own = [m for m in modules.values() if re.match(r"zero_core(?!\.testing)", m.name)]
    aliases = {name for module in own for name in _callable_aliases(module)}
    words = re.compile("|".join(rf"\b{name}\b" for name in sorted({"Callable", *aliases})))
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


def _callable_aliases(module: Module) -> set[str]:
    """Names that a module gives to types of callables."""
    return {
        target.id
        for node in module.tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Callable[")
        for target in node.targets
        if isinstance(target, ast.Name)
    }


CHECKS = {
    "crowded folders": find_crowded_folders,
    "cycles and floors": find_import_tangles,
    "imports that zero-core's table forbids": find_forbidden_imports,
    "capability probes": find_capability_probes,
    "private attributes of another file's class": find_foreign_privates,
    "imports of the engine for types alone": find_engine_imports_for_types,
}


def main(root: Path) -> int:
    """Print what breaks a rule; the exit code is 1 if anything does."""
    modules = read_modules(root)
    failures = 0
    for title, check in CHECKS.items():
        found = check(modules)
        failures += len(found)
        print(f"{title}: {len(found)}", *found, sep="\n  ")
    callables = find_callable_parameters(modules)
    is_over = len(callables) > MAX_CALLABLES
    print(f"Callable parameters of zero-core: {len(callables)} (at most {MAX_CALLABLES})")
    if is_over:
        print(*callables, sep="\n  ")
    return int(bool(failures) or is_over)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1])))
