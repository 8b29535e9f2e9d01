"""Workflows and release tags agree with the packages that they are about."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"
FOLDERS = (*sorted((ROOT / "packages").iterdir()), ROOT / "integration")
_spec = importlib.util.spec_from_file_location("ci_release", ROOT / ".ci" / "release.py")
assert _spec is not None
assert _spec.loader is not None
release = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(release)


def _workflow(name: str) -> dict[str, Any]:
    # YAML 1.1 takes the key "on" for true.
    found = yaml.safe_load((WORKFLOWS / f"{name}.yml").read_text(encoding="utf-8"))
    return {"on" if key is True else key: value for key, value in found.items()}


def _nox_constant(name: str) -> Any:
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    )
    return ast.literal_eval(value)


def _project(folder: Path) -> dict[str, Any]:
    return dict(tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8")))


NAMES = {_project(folder)["project"]["name"]: folder for folder in FOLDERS}
COMPILED = {name for name, folder in NAMES.items() if (folder / "CMakeLists.txt").exists()}


def test_ci_runs_every_session_and_every_column_of_the_matrix() -> None:
    jobs = _workflow("ci")["jobs"] | _workflow("nightly")["jobs"]
    texts = [path.read_text(encoding="utf-8") for path in WORKFLOWS.glob("*.yml")]
    for session in ("docs", "nightly", "wheels"):
        assert any(re.search(rf'nox -s "?{session}\b', text) for text in texts), session
    torch, python = jobs["matrix"]["strategy"]["matrix"].values()
    releases = [f"{torch}-cuda-{cuda}" for torch, cuda in _nox_constant("TORCH_CUDA").items()]
    assert torch == releases
    assert tuple(python) == _nox_constant("PYTHONS")
    assert jobs["gate"]["strategy"]["matrix"]["python"] == python
    assert {*jobs["minimum"]["strategy"]["matrix"]["part"]} == {
        "integration" if folder.name == "integration" else folder.name for folder in FOLDERS
    }


def test_compiled_packages_have_wheels_for_the_four_platforms() -> None:
    packages = _workflow("packages")["jobs"]["platforms"]["strategy"]["matrix"]["package"]
    assert {*packages} == COMPILED == {"cpu-adam", "zero-comm"}
    runners = _workflow("wheels")["jobs"]["compiled"]["strategy"]["matrix"]["include"]
    assert {runner["archs"] for runner in runners} == {"x86_64", "aarch64", "arm64", "AMD64"}
    built = [_project(NAMES[name])["tool"]["cibuildwheel"] for name in COMPILED]
    for key in ("build", "skip", "linux", "macos", "windows"):
        assert built[0][key] == built[1][key]


def test_every_package_is_released_by_its_tag_without_a_token() -> None:
    workflow = _workflow("release")
    assert {*workflow["on"]["push"]["tags"]} == {f"{name}-v*" for name in NAMES}
    publish = workflow["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"]["name"].startswith("pypi-")
    assert "secrets." not in (WORKFLOWS / "release.yml").read_text(encoding="utf-8")
    others = [job.get("permissions") for name, job in workflow["jobs"].items() if name != "publish"]
    assert not any(others)


def test_a_tag_is_checked_against_package_and_changelog(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "zero-engine"
    folder = tmp_path / release.folder_of(name)
    folder.mkdir(parents=True)
    assert "expected PACKAGE-vVERSION" in str(release.find_problem(f"{name}-v1.2.0", tmp_path))
    text = f'[project]\nname = "{name}"\nversion = "1.2.0"\n'
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    (folder / "CHANGELOG.md").write_text("## [1.2.0] - unreleased\n", encoding="utf-8")
    assert "has no line" in str(release.find_problem(f"{name}-v1.2.0", tmp_path))
    (folder / "CHANGELOG.md").write_text("## [1.2.0] - 2030-01-31\n", encoding="utf-8")
    assert release.find_problem(f"{name}-v1.2.0", tmp_path) is None
    assert "1.2.0" in str(release.find_problem(f"{name}-v1.2.1", tmp_path))
    assert release.main(f"{name}-v9") == 1
    assert f"{name} {_project(NAMES[name])['project']['version']}" in capsys.readouterr().err


def test_the_extra_all_has_every_extra_of_users() -> None:
    extras = _project(ROOT / "integration")["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    assert {*re.findall(r"\w+", everything.partition("[")[2])} == extras.keys() - {
        *("all", "test", "bench")
    }
