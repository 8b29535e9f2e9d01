"""This engine beside DeepSpeed itself, where that is installed, as scripts see both."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import environment, run_program

from tests.support.deepspeed_names import TABLE, deepspeeds_folder, public_names
from tests.test_deepspeed_config_table import ROWS, TYPES
from zero_engine import deepspeed
from zero_engine.deepspeed.engine.facts import UNSERVED
from zero_engine.deepspeed.served import reason_to_refuse

FOLDER = deepspeeds_folder() or Path()
HERE = Path(__file__).parent
SCRIPT = HERE / "scripts" / "deepspeed_loop.py"
EXACT = ("counts", "facts", "loaded", "missing", "rates", "tag")
pytestmark = pytest.mark.skipif(deepspeeds_folder() is None, reason="DeepSpeed is not installed")


def _run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**environment(), "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _flat(value: Any) -> list[Any]:
    return [x for inner in value for x in _flat(inner)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_script_sees_the_same_training(stage: int, tmp_path: Path) -> None:
    for name in ("theirs", "ours"):
        (tmp_path / name).mkdir()
    words = [str(SCRIPT), str(stage), "fp32"]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    _run(*launcher, *words, str(tmp_path / "theirs"))
    run_program("run", "--nproc-per-node=2", *words, str(tmp_path / "ours"))
    theirs, ours = (
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("theirs", "ours")
    )
    assert ours.keys() == theirs.keys()
    for key, expected in theirs.items():
        if key in EXACT:
            assert ours[key] == expected, key
        else:
            assert _flat(ours[key]) == pytest.approx(_flat(expected), rel=1e-5, abs=1e-7), key


def test_rates_momenta_and_arguments_of_schedules_have_the_same_bits_at_every_step() -> None:
    program = str(HERE / "support" / "deepspeed_curves.py")
    theirs, ours = (
        json.loads(_run(program, module))  # JSON keeps every bit of a float
        for module in ("deepspeed.runtime.lr_schedules", "zero_engine.deepspeed.lr_schedules")
    )
    assert ours["tuning"] == theirs["tuning"]
    for mine, expected in zip(ours["curves"], theirs["curves"], strict=True):
        assert mine == expected
    rates = {row[1][0] for curve in theirs["curves"] for row in curve[1:]}
    assert len(rates) > 150  # the curves do move


def test_every_key_has_a_row_and_its_default() -> None:
    printed = _run(str(HERE / "support" / "deepspeed_keys.py"))
    (line,) = (line for line in printed.splitlines() if line.startswith("KEYS "))
    found = json.loads(line.removeprefix("KEYS "))
    rows = {row.key: row for row in ROWS}
    blocks = {".".join(key.split(".")[: i + 1]) for key in rows for i in range(key.count("."))}
    asked = set(found["asked"]) | set(found["models"])
    assert asked <= rows.keys() | blocks, asked - rows.keys() - blocks
    for key, default in found["models"].items():
        if key in rows and rows[key].default != "-":
            assert json.loads(rows[key].default.strip("`")) == default, key
    assert set(found["optimizers"]) <= {row.name.lower() for row in TYPES["optimizer"]}
    assert set(found["schedules"]) <= {row.name for row in TYPES["scheduler"]}
    ours = {key for key, row in rows.items() if row.default != "-"}
    of_models = {key for key in ours if key.rpartition(".")[0] in {"fp16", "wandb", "comet"}}
    assert of_models <= set(found["models"]), "a row's key is gone from DeepSpeed"


def test_every_method_name_and_module_is_served_or_refused() -> None:
    tree = ast.parse((FOLDER / "runtime" / "engine.py").read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    methods = next(c for c in classes if c.name == "DeepSpeedEngine").body
    names = {m.name for m in methods if isinstance(m, ast.FunctionDef) and m.name[0] != "_"}
    own = {name for name in names if hasattr(deepspeed.DeepSpeedEngine, name)}
    assert names - own == UNSERVED
    assert public_names(FOLDER) == json.loads(TABLE.read_text(encoding="utf-8"))
    modules = [
        ".".join(path.relative_to(FOLDER).with_suffix("").parts).removesuffix(".__init__")
        for path in FOLDER.rglob("*.py")
    ]
    missing = [name for name in modules if name != "__init__" and reason_to_refuse(name) is None]
    assert not missing
