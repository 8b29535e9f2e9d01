"""Measure which deliberate faults are detected by the gate, the tests of ``.ci/run``.

    python integration/lab/mutants/mutants.py reach WORK
    python integration/lab/mutants/mutants.py draw WORK
    python integration/lab/mutants/mutants.py run WORK --minutes 60

``reach`` records with coverage.py which source lines each test file of the gate executes, also in
rank processes (about 40 minutes on two cores). ``draw`` chooses mutants in those lines by a fixed
seed and writes `LIST`. ``run`` applies one mutant at a time to a copy of the sources. It runs test
files that reach the mutant's line: first those named like the source, then the fastest, at most
`MOST_FILES`. It stops at the first failure and saves the verdict in `LIST`.

"killed" is certain. "survived" may be wrong, so survivors were run again by hand on further files.
"equivalent" is a judgement, and "gone" means that the line no longer exists. All three commands
resume where they stopped. A test file that runs `PATIENCE_S` longer than without the mutant counts
as a failure. A test file newer than ``reach`` has the reach of the files that its tests were in
before (``former_tests.tsv``). Without such files it is assumed to reach every line of sources with
a similar name. All packages with their test groups, and coverage, must be installed.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]
FORMER = ROOT / "integration/lab/former_tests/former_tests.tsv"
LIST = Path(__file__).with_name("mutants.json")
MUTATED = ("zero-core", "zero-offload", "zero-comm")
FOLDERS = (*(f"packages/{name}" for name in MUTATED), "integration")
NUM_MUTANTS, SEED = 60, 20261128
NUM_PROCESSES = 2
PATIENCE_S = 60.0
MOST_FILES = 12
_TOOLS = ("-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist")
_WAITS = ("wait", "synchronize", "drain", "join", "finish", "barrier", "publish")
_SWAPS: dict[type, str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.And: "or",
    ast.Or: "and",
}


class Mutant(NamedTuple):
    """One textual change of a source file.

    Attributes:
        path: path of the file, relative to the repository.
        line: line where the change begins, from 1.
        kind: operator, bound, wait, argument or line.
        start: offset of the replaced text, in characters.
        before: the replaced text.
        after: the replacement.
    """

    path: str
    line: int
    kind: str
    start: int
    before: str
    after: str


def gate_files() -> list[str]:
    """Return the gate's test files that may run mutated packages, relative to the root."""
    return [
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("test_*.py"))
        if {"tests", "conformance"} & {*path.parts} and "slow" not in path.parts
    ]


def reach(work: Path) -> None:
    """Write each test file's reached lines and run time to ``work/reach/NAME.json``."""
    (work / "reach").mkdir(parents=True, exist_ok=True)
    tree = _copy_tree(work / "sources")

    def measure(file: str) -> None:
        result = work / "reach" / (file.replace("/", ".") + ".json")
        if result.exists():
            return
        data = work / "data" / result.stem
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir(parents=True)
        settings = data / "rc"
        settings.write_text(
            f"[run]\ndata_file = {data / 'lines'}\nparallel = true\nsigterm = true\n"
            "patch = subprocess, fork, _exit\nconcurrency = thread, multiprocessing\n"
            "source_pkgs = zero_core, zero_offload, zero_comm\n"
            "disable_warnings = no-data-collected,module-not-imported,module-not-measured\n"
        )
        begun = time.monotonic()
        program = ("-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest")
        code = _run(tree, file, program, timeout=1800)
        seconds = time.monotonic() - begun
        lines = _lines(data, tree)
        shutil.rmtree(data)
        found = {"seconds": round(seconds, 1), "passed": code == 0, "lines": lines}
        result.write_text(json.dumps(found))
        print(f"{file}: exit {code}, {seconds:.0f} s, {len(lines)} sources", flush=True)

    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        list(pool.map(measure, gate_files()))


def _lines(data: Path, tree: Path) -> dict[str, list[int]]:
    from coverage import CoverageData
    from coverage.exceptions import DataError

    found: dict[str, set[int]] = {}
    for part in data.glob("lines.*"):
        read = CoverageData(str(part))
        try:
            read.read()
        except DataError:  # the data file of a rank that was killed while writing
            continue
        for name in read.measured_files():
            if Path(name).is_relative_to(tree):
                relative = Path(name).relative_to(tree).as_posix()
                found.setdefault(relative, set()).update(read.lines(name) or ())
    return {name: sorted(lines) for name, lines in sorted(found.items())}


def _run(root: Path, file: str, program: tuple[str, ...], *, timeout: float) -> int:
    """Run pytest on ``file`` in the tree ``root``.

    Return its exit code, or -1 after ``timeout``.
    """
    folder = next(f for f in FOLDERS if file.startswith(f + "/"))
    sources = [str(root / f / "src") for f in FOLDERS]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sources),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "DS_ACCELERATOR": "cpu",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    test = Path(file).relative_to(folder).as_posix()
    process = subprocess.Popen(
        [sys.executable, *program, *_TOOLS, test],
        cwd=root / folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return -1
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also ends the ranks of a run that timed out
        process.wait()


def draw(work: Path) -> None:
    """Choose `NUM_MUTANTS` mutants, equally many of each kind, and write `LIST`."""
    if LIST.exists():
        raise SystemExit(f"{LIST} is there: a list is drawn once, so that figures compare")
    reached: dict[str, set[int]] = {}
    for measured in _reached(work).values():
        for path, lines in measured["lines"].items():
            reached.setdefault(path, set()).update(lines)
    by_kind: dict[str, list[Mutant]] = {}
    for path, lines in sorted(reached.items()):
        if "/testing/" not in path:
            text = (ROOT / path).read_text(encoding="utf-8")
            for mutant in _mutants(path, text, lines):
                if _is_python(
                    _mutated(text, mutant._asdict())
                ):  # skips replacements that split a pair of parentheses
                    by_kind.setdefault(mutant.kind, []).append(mutant)
    chosen, generator = [], random.Random(SEED)
    for number in range(NUM_MUTANTS):
        found = by_kind[sorted(by_kind)[number % len(by_kind)]]
        chosen.append(found.pop(generator.randrange(len(found))))
    _save([mutant._asdict() for mutant in chosen])


def _mutated(text: str, row: Mapping[str, Any]) -> str:
    stop = row["start"] + len(row["before"])
    assert text[row["start"] : stop] == row["before"], f"{row['path']} is of another commit"
    return text[: row["start"]] + row["after"] + text[stop:]


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _mutants(path: str, text: str, lines: set[int]) -> Iterator[Mutant]:
    """Yield every mutant in ``lines`` of a source file with contents ``text``."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    raw = text.encode()

    def span(node: Any) -> tuple[int, int]:
        first = starts[node.lineno - 1] + node.col_offset
        return first, starts[node.end_lineno - 1] + node.end_col_offset

    def change(kind: str, line: int, start: int, stop: int, after: str) -> Mutant:
        before = raw[start:stop].decode()
        return Mutant(path, line, kind, len(raw[:start].decode()), before, after)

    for node in _code(ast.parse(text)):
        line = getattr(node, "lineno", 0)
        if line not in lines:
            continue
        for kind, first, last in _replaced(node, span):
            between = raw[first:last].decode()
            match node:
                case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.Compare(ops=[op]):
                    yield change(kind, line, first, last, f" {_SWAPS[type(op)]} ")
                case ast.Call(args=[one, other, *_]):
                    a, b = span(one), span(other)
                    swapped = raw[slice(*b)] + raw[a[1] : b[0]] + raw[slice(*a)]
                    yield change(kind, line, first, last, swapped.decode())
                case ast.Constant():
                    yield change(kind, line, first, last, str(int(between, 0) + 1))
                case _:
                    yield change(kind, line, first, last, "pass")


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that mutants may change: no annotations, errors, f-strings or logs."""
    for field, value in ast.iter_fields(tree):
        children = value if isinstance(value, list) else [value]
        for child in children:
            is_text = isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr) or _is_log(child)
            if (
                isinstance(child, ast.AST)
                and not is_text
                and field not in ("annotation", "returns")
            ):
                yield child
                yield from _code(child)


def _is_log(node: Any) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith(("_log.", "warnings."))


def _replaced(
    node: ast.AST, span: Callable[[Any], tuple[int, int]]
) -> Iterator[tuple[str, int, int]]:
    """Yield the kinds of mutants of ``node``, each with the span of bytes to replace."""
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SWAPS:
            yield "operator", span(left)[1], span(right)[0]
        case ast.BoolOp(values=[left, right]):
            yield "operator", span(left)[1], span(right)[0]
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _SWAPS:
            yield "bound", span(left)[1], span(right)[0]
        case ast.Constant(value=bool() | None):
            pass
        case ast.Constant(value=int()):
            yield "bound", *span(node)
        case ast.Call(args=[one, other, *_], keywords=[]) if not (
            isinstance(one, ast.Starred) or isinstance(other, ast.Starred)
        ):
            yield "argument", span(one)[0], span(other)[1]
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))) if any(
            wait in name for wait in _WAITS
        ):
            yield "wait", *span(node)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "line", *span(node)
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "line", *span(node)


def run(work: Path, minutes: float) -> None:
    """Judge the mutants without a verdict, for about ``minutes`` at most."""
    rows = json.loads(LIST.read_text())
    reached = _reached(work)
    until = time.monotonic() + 60 * minutes
    trees: SimpleQueue[Path] = SimpleQueue()
    for number in range(NUM_PROCESSES):
        trees.put(_copy_tree(work / f"tree{number}"))

    def judge(row: dict[str, Any]) -> None:
        if "verdict" in row or time.monotonic() > until:
            return
        tree = trees.get()
        try:
            found = _judge(row, tree, reached)
        finally:
            trees.put(tree)
        row.update(found)
        _save(rows)
        print(row["path"], row["line"], row["kind"], row["verdict"], row["by"], flush=True)

    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        list(pool.map(judge, rows))
    counts = [row.get("verdict", "open") for row in rows]
    print({verdict: counts.count(verdict) for verdict in sorted(set(counts))})


def _judge(row: dict[str, Any], tree: Path, reached: dict[str, Any]) -> dict[str, Any]:
    file = tree / row["path"]
    text = file.read_text(encoding="utf-8")
    file.write_text(_mutated(text, row), encoding="utf-8")
    words = {*Path(row["path"]).with_suffix("").parts[-2:]} | {*Path(row["path"]).stem.split("_")}
    files = sorted(
        (not is_named, measured["seconds"], name)
        for name, measured in reached.items()
        for is_named in [any(word in Path(name).stem for word in words)]
        if measured["passed"]
        if row["line"] in measured["lines"].get(row["path"], [row["line"]] * measured["is_new"])
        if is_named or not measured["is_new"]
    )
    for *_, seconds, name in files[:MOST_FILES]:
        limit = seconds + PATIENCE_S
        try:
            code = _run(tree, name, ("-m", "pytest"), timeout=limit)
        finally:
            file.write_text(text, encoding="utf-8")
        # A failure counts only if the file passes without the mutant.
        if code not in (0, 5) and not _run(tree, name, ("-m", "pytest"), timeout=2 * limit):
            return {"verdict": "killed", "by": name + " without an end" * (code == -1)}
        file.write_text(_mutated(text, row), encoding="utf-8")
    file.write_text(text, encoding="utf-8")
    tried = min(len(files), MOST_FILES)
    return {"verdict": "survived", "by": f"none of {tried} of {len(files)} files that reach it"}


def _copy_tree(tree: Path) -> Path:
    """Copy sources, tests and the installed compiled modules to ``tree``."""
    shutil.rmtree(tree, ignore_errors=True)
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", ".*", "node_modules")
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    for name in (
        "README.md",
        "constraints.txt",
        "pyproject.toml",
        "noxfile.py",
        "docs",
        ".ci",
        ".github",
    ):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tree / name)
    installed = importlib.util.find_spec("zero_comm")
    if installed is None or installed.origin is None:
        raise SystemExit("install all packages first")
    for module in Path(installed.origin).parent.glob("*.so"):
        shutil.copy(module, tree / "packages/zero-comm/src/zero_comm")
    return tree


def _reached(work: Path) -> dict[str, Any]:
    recorded = {path.stem: json.loads(path.read_text()) for path in (work / "reach").glob("*.json")}
    parents: dict[str, set[str]] = {}
    for line in FORMER.read_text(encoding="utf-8").splitlines():
        old, new = line.split("\t")
        for file in re.findall(r"[\w./-]+\.py", new):
            parents.setdefault(file, set()).add(old.split("::")[0].replace("/", "."))
    found = {}
    for file in gate_files():
        own = file.replace("/", ".")
        measured = [recorded[p] for p in {own, *parents.get(file, ())} if p in recorded]
        lines: dict[str, set[int]] = {}
        for each in measured:
            for path, numbers in each["lines"].items():
                lines.setdefault(path, set()).update(numbers)
        found[file] = {
            "seconds": max((each["seconds"] for each in measured), default=PATIENCE_S),
            "passed": recorded.get(own, {"passed": True})["passed"],
            "lines": lines,
            "is_new": not measured,
        }
    return found


def _save(rows: list[dict[str, Any]]) -> None:
    part = LIST.with_suffix(".part")
    part.write_text(json.dumps(rows, indent=1) + "\n")
    part.replace(LIST)


def main() -> None:
    """Run one of the three commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("verb", choices=("reach", "draw", "run"))
    parser.add_argument("work", type=Path, help="folder for what is kept between calls")
    parser.add_argument("--minutes", type=float, default=60.0, help="bound of run")
    given = parser.parse_args()
    work = given.work.resolve()
    if given.verb == "reach":
        reach(work)
    elif given.verb == "draw":
        draw(work)
    else:
        run(work, given.minutes)


if __name__ == "__main__":
    main()
