"""Names the successor of each removed test: ``python former_tests.py [NAME]``.

`former_tests.tsv` has a line for each test function, or file (``path::*``), that a commit since
`BASE` removed or renamed. The line has the old name, and the new name, a row of an equality table,
or a reason. Without NAME, the old tests that neither exist nor are listed are printed, and the exit
code is 1 if there are any. With NAME, the lines that contain it are printed.
"""

from __future__ import annotations

import ast
import fnmatch
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

BASE = "71eeaa7f"
"""Last commit with all tests in their original files."""
ROOT = Path(__file__).resolve().parents[3]
TABLE = Path(__file__).with_suffix(".tsv")


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def _tests(path: str, text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield f"{path}::{node.name}"


def _is_test_file(path: str) -> bool:
    return "/tests/" in path and path.rsplit("/", 1)[-1].startswith("test_")


def find_unlisted() -> list[str]:
    """Return the tests of `BASE` that neither exist now nor are listed in the table."""
    old_paths = filter(_is_test_file, _git("ls-tree", "-r", "--name-only", BASE).splitlines())
    old = [name for path in old_paths for name in _tests(path, _git("show", f"{BASE}:{path}"))]
    new_paths = filter(_is_test_file, _git("ls-files", "*.py").splitlines())
    new = {
        name
        for path in new_paths
        if (ROOT / path).exists()
        for name in _tests(path, (ROOT / path).read_text(encoding="utf-8"))
    }
    listed = [  # names without their classes
        re.sub("::Test\\w+", "", line.split("\t")[0])
        for line in TABLE.read_text(encoding="utf-8").splitlines()
    ]
    patterns = [name for name in listed if "*" in name]
    known = new | set(listed)
    return [
        name
        for name in old
        if name not in known and not any(fnmatch.fnmatch(name, each) for each in patterns)
    ]


def main(arguments: list[str]) -> int:
    """Print the unlisted tests, or the lines of the table that contain a name."""
    if arguments:
        lines = TABLE.read_text(encoding="utf-8").splitlines()
        print(*(line for line in lines if arguments[0] in line), sep="\n")
        return 0
    unlisted = find_unlisted()
    print(*unlisted, f"{len(unlisted)} tests are neither there nor listed", sep="\n")
    return int(bool(unlisted))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
