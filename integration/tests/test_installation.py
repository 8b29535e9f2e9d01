"""Packages beside torch: an installation changes no torch, and a missing package is named."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CAPTURED, environment

from zero_core.errors import MissingPartError
from zero_core.testing import Case, batch, make_model, simulate

ROOT = Path(__file__).parents[2]
PARTS = ("cpu-adam", "zero-comm", "zero-offload")
SETS = [present for n in range(len(PARTS) + 1) for present in combinations(PARTS, n)]
NEEDED: dict[str, tuple[Any, set[str]]] = {
    "zero_quantized_gradients": (True, {"zero-comm"}),
    "offload_optimizer": ({"device": "cpu"}, {"cpu-adam", "zero-offload"}),
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("uv") is None, reason="uv prints what it would install")
@pytest.mark.parametrize("build", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_an_installation_leaves_the_torch_that_is_there(build: str) -> None:
    """``build``: this torch's. The CUDA build runs it in ``nox -s cuda``."""
    assert (torch.version.cuda is None) is (build == "cpu")
    folders = (*(f"packages/{name}" for name in ("zero-core", *PARTS)), "integration")
    chosen = [str(ROOT / folder) for folder in folders]
    command = ("uv", "pip", "install", "--dry-run", "--python", sys.executable, *chosen)
    done = subprocess.run(command, **CAPTURED)
    changes = [line.split()[:2] for line in done.stderr.splitlines() if line[:2] in (" +", " -")]
    names = {name.split("==")[0] for _, name in changes}
    assert {"zero-core", "zero-engine"} <= names, done.stderr
    assert "torch" not in names, done.stderr


TRAINS = """
import torch
from zero_core.testing import Case, batch, make_model
assert not torch.accelerator.is_available()
engine = Case(3, zero={"offload_optimizer": {"device": "cpu"}}).build(model=make_model())
for step in range(20):
    engine.backward(engine(**batch(step, 0, 0))["loss"])
    engine.step()
"""


@pytest.mark.cuda
def test_cuda_build_trains_on_a_cpu_where_no_device_is() -> None:
    more = {**environment(), "FAKE_CUDA_DEVICES": "0"}
    done = subprocess.run([sys.executable, "-c", TRAINS], env=more, **CAPTURED)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("present", SETS)
def test_each_set_of_packages_trains_or_names_the_one_that_is_missing(
    present: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(**chosen: str) -> list[Any]:
        return [p for p in entry_points(**chosen) if p.dist and p.dist.name in present]

    def train(ranks: Any, case: Case) -> None:
        engine = case.build(ranks, model=make_model())
        engine.backward(engine(**batch(0, 0, ranks.rank))["loss"])
        engine.step()

    monkeypatch.setattr("zero_core.parts.entry_points", installed)
    for key, (value, needed) in NEEDED.items():
        monkeypatch.setattr("zero_core.parts.FOUND", {})
        case, lacking = Case(2, zero={key: value}), needed - {*present}
        if not lacking:
            simulate(train, 2, case)
            continue
        with pytest.raises(MissingPartError, match=rf"{key}.*pip install ({'|'.join(lacking)})"):
            simulate(train, 2, case)
