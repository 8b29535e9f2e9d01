"""The rules about the structure of the source hold, and breaking one is seen."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def load_script(name: str) -> ModuleType:
    """Import a script of the folder ``.ci``."""
    spec = importlib.util.spec_from_file_location(f"ci_{name}", ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


structure = load_script("structure")
docstrings = load_script("docstrings")
CORE = "packages/zero-core/src/zero_core"


@pytest.fixture(scope="module")
def modules() -> Any:
    """All source files. They are parsed by the one test process that asks for them."""
    return structure.read_modules(ROOT)


def test_each_decision_has_a_number_of_its_own() -> None:
    files = [path.name for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md")]
    assert len({name.split("-")[0] for name in files}) == len(files) > 0


@pytest.mark.parametrize("title", structure.CHECKS)
def test_the_source_keeps_the_rule(title: str, modules: Any) -> None:
    assert "zero_core.engine" in modules
    assert structure.CHECKS[title](modules) == []


def test_signatures_of_zero_core_take_few_callables(modules: Any) -> None:
    found = structure.find_callable_parameters(modules)
    assert len(found) <= structure.MAX_CALLABLES, "\n".join(found)


def test_an_alias_of_a_callable_counts_as_one(tmp_path: Path) -> None:
    path = tmp_path / CORE / "a.py"
    path.parent.mkdir(parents=True)
    path.write_text("Job = Callable[[], None]\ndef run(job: Job, other: Callable[[], int]): ...")
    modules = structure.read_modules(tmp_path)
    assert len(structure.find_callable_parameters(modules)) == 2


def test_first_lines_of_docstrings_are_sentences_or_noun_phrases() -> None:
    assert docstrings.main([]) == 0


def test_what_a_package_exports_is_documented(tmp_path: Path) -> None:
    source = tmp_path / "part"
    source.mkdir()
    (source / "__init__.py").write_text("from part.a import Thing, run", encoding="utf-8")
    thing = 'class Thing:\n  """A thing."""\n  def go(self): ...\n  def _stop(self): ...\n'
    (source / "a.py").write_text(thing + "def run(): ...\ndef inner(): ...", encoding="utf-8")
    found = [line.split(": ", 1)[1].split()[0] for line in docstrings.find_undocumented(source)]
    assert found == ["go", "run"]


@pytest.mark.parametrize(
    ("title", "files"),
    [
        ("crowded folders", {f"{CORE}/m{i}.py": "" for i in range(15)}),
        (
            "cycles and floors",
            {f"{CORE}/a.py": "import zero_core.b.c", f"{CORE}/b/c.py": "import zero_core.a"},
        ),
        (
            "cycles and floors",
            {f"{CORE}/m{i}.py": f"import zero_core.m{i + 1}" for i in range(9)},
        ),
        (
            "imports that zero-core's table forbids",
            {f"{CORE}/layout/a.py": "import zero_core.plan.b", f"{CORE}/plan/b.py": ""},
        ),
        ("capability probes", {f"{CORE}/a.py": "def f(x): return getattr(x, 'speed', None)"}),
        ("capability probes", {f"{CORE}/a.py": "def f(self): return hasattr(self._tier, 'speed')"}),
        (
            "private attributes of another file's class",
            {
                f"{CORE}/a.py": "class A:\n  def __init__(self): self._x = 1",
                f"{CORE}/b.py": "def f(a): return a._x",
            },
        ),
        (
            "imports of the engine for types alone",
            {f"{CORE}/a.py": "if TYPE_CHECKING:\n  from zero_core.engine import Engine"},
        ),
    ],
)
def test_a_broken_rule_is_seen(title: str, files: dict[str, str], tmp_path: Path) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text, encoding="utf-8")
        for folder in [*path.parents][: len(Path(name).parts) - 4]:
            (folder / "__init__.py").touch()
    modules = structure.read_modules(tmp_path)
    assert structure.CHECKS[title](modules)
    others = [check(modules) for other, check in structure.CHECKS.items() if other != title]
    assert not any(others)


@pytest.mark.parametrize(
    "line",
    [
        "What is still to be followed.",
        "Of its row.",
        "The shard; the rest is padding.",
        "Values that other ranks lie about.",
    ],
)
def test_a_first_line_that_is_a_fragment_is_marked(line: str) -> None:
    assert docstrings.find_marks(line)


@pytest.mark.parametrize("line", ["Gather the parameters of a unit.", "Flat gradients of a unit."])
def test_a_plain_first_line_is_not_marked(line: str) -> None:
    assert docstrings.find_marks(line) == []
