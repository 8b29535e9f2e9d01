"""Check of a release tag: ``python .ci/release.py zero-core-v0.2.0``.

Prints outputs for the release workflow: the package, its folder, and whether it has compiled code.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def find_problem(tag: str, root: Path = ROOT) -> str | None:
    """Return why ``tag`` is not a valid release tag, or None."""
    name, separator, version = tag.rpartition("-v")
    folder = root / folder_of(name)
    if not separator or not (folder / "pyproject.toml").is_file():
        return f"{tag}: expected PACKAGE-vVERSION with the name of a package of this repository"
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if (project["name"], project["version"]) != (name, version):
        return f"{tag}: {folder.name}/pyproject.toml has {project['name']} {project['version']}"
    changes = (folder / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changes, re.M):
        return f"{tag}: CHANGELOG.md has no line '## [{version}] - YYYY-MM-DD'"
    return None


def folder_of(package: str) -> str:
    """Return the folder of ``package``, relative to the repository's root."""
    return "integration" if package == "zero-parts" else f"packages/{package}"


def main(tag: str) -> int:
    """Print the outputs for the workflow, or the problem. Returns the exit code."""
    problem = find_problem(tag)
    if problem is not None:
        print(problem, file=sys.stderr)
        return 1
    package = tag.rpartition("-v")[0]
    compiled = (ROOT / folder_of(package) / "CMakeLists.txt").is_file()
    print(f"package={package}\nfolder={folder_of(package)}\ncompiled={str(compiled).lower()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
