"""Resolution of dependencies with each build of torch, from indexes of wheels without code."""

import functools
import http.server
import shutil
import threading
import zipfile
from pathlib import Path

import pytest

from compat import releases

OWN = """[project]\nname = "own"\nversion = "1"\ndependencies = ["numpy>=2", "torch>=2.10"]\n"""


def make_wheel(index: Path, name: str, version: str, needs: str = "") -> None:
    """Write a wheel without code into an index's folder."""
    (index / name).mkdir(parents=True, exist_ok=True)
    fields = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
    with zipfile.ZipFile(index / name / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}-{version}.dist-info/METADATA", fields)
        wheel.writestr(f"{name}-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\n")


@pytest.fixture
def indexes(tmp_path, monkeypatch):
    """Serve stand-ins of torch's index and the default one to uv, and copy the table of results."""
    make_wheel(tmp_path / "default", "numpy", "2.1")
    make_wheel(tmp_path / "default", "torch", "2.13.0")
    make_wheel(tmp_path / "whl/cu126", "numpy", "1.26")  # must not hide NumPy 2
    make_wheel(tmp_path / "whl/cu126", "torch", "2.13.0+cu126")
    make_wheel(tmp_path / "whl/cu132", "torch", "2.13.0+cu132", "Requires-Dist: numpy<2\n")
    (tmp_path / "own").mkdir()
    (tmp_path / "own/pyproject.toml").write_text(OWN)
    for name in ("TABLE", "PAGE"):
        monkeypatch.setattr(releases, name, Path(shutil.copy(getattr(releases, name), tmp_path)))
    table = releases.read_table()
    for build in ("cpu", "cu126", "cu130", "cu132"):
        table["torch"]["2.13.0"][build] = {}  # no earlier runs
    releases.write(table)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        for name, value in (("DEFAULT_INDEX", f"{url}/default"), ("CACHE_DIR", f"{tmp_path}/uv")):
            monkeypatch.setenv(f"UV_{name}", value)
        monkeypatch.delenv("UV_FIND_LINKS", raising=False)
        monkeypatch.setattr(releases, "INDEX", f"{url}/whl")
        monkeypatch.setattr(releases, "PACKAGES", {"own": str(tmp_path / "own")})
        yield
        server.shutdown()
    releases.is_resolved.cache_clear()


def results() -> dict[str, list[str]]:
    """Return the kinds of results by build of torch 2.13.0."""
    release = releases.read_table()["torch"]["2.13.0"]
    return {build: [*release[build]["3.12"]] for build in ("cpu", "cu126", "cu130", "cu132")}


def test_builds_are_resolved_from_torchs_index(indexes):
    assert releases.resolve("2.13.0") == 1
    # Torch's index has no build for the CPU. The build for CUDA 13.2 needs another NumPy.
    found = {"cpu": "conflict", "cu126": "resolved", "cu130": "resolved", "cu132": "conflict"}
    assert results() == {build: [result] for build, result in found.items()}
    row = "| 2.13.0 (cu130) | conflict | resolved | absent | resolved | conflict |"
    assert row in releases.PAGE.read_text()


def test_builds_are_resolved_with_the_default_without_torchs_index(indexes, monkeypatch):
    monkeypatch.setattr(releases, "INDEX", "http://127.0.0.1:9/whl")
    assert releases.resolve("2.13.0") == 0
    by_default = {build: ["resolved", "by"] for build in ("cpu", "cu126", "cu132")}
    assert results() == by_default | {"cu130": ["resolved"]}
    releases.record("2.13.0", "cu126", "3.11", is_passed=False)
    _, _, row = releases.PAGE.read_text().partition("| 2.13.0 (cu130) | resolved* | **failed** 2")
    assert " (3.11), resolved* (3.12 3.13 3.14) | absent | resolved | resolved* |" in row
