"""The examples are short, and run by the commands that stand in them."""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.forked_python import forked_python

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "integration" / "examples").glob("*.py"))
MODULES = {"torchrun": "torch.distributed.run", "zero-engine": "zero_engine"}
# test_cluster_recipes runs the one of FSDP2; `nox -s examples`, which installs Ray too, runs all.
HERE = [path for path in EXAMPLES if path.stem == "lightning_example"]


def _command(path: Path) -> list[str]:
    """The second paragraph of its docstring, run by this interpreter, in any folder."""
    description = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert description is not None
    program, *arguments = shlex.split(description.split("\n\n")[1])
    module = () if program == "python" else ("-m", MODULES[program])
    places = [str(ROOT / word) if (ROOT / word).is_file() else word for word in arguments]
    return [sys.executable, *module, *places]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_asserts_that_its_loss_falls(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    assert any(line.strip().startswith("assert ") for line in lines)
    assert str(path) in _command(path)


@pytest.mark.parametrize("path", HERE, ids=lambda path: path.stem)
def test_loss_falls(path: Path, tmp_path: Path) -> None:
    _, *arguments = _command(path)
    done = subprocess.run(
        [forked_python(), *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loss " in done.stdout
