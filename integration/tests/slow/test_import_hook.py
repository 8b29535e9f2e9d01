"""``zero-engine run`` serves deepspeed in the processes that it starts, and in no others."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import environment, run_program

from benchmarks.harness.forked_python import forked_python
from zero_engine.deepspeed.served import reason_to_refuse
from zero_engine.script.hook import ON_PATH, hooked, install
from zero_engine.script.mends import mend_loading
from zero_engine.script.run import run_program as run_script

SCRIPT = Path(__file__).parents[1] / "scripts" / "sees_deepspeed.py"
SITECUSTOMIZE = "import os\nos.environ['HIDDEN_SITECUSTOMIZE'] = 'was run'\n"


@pytest.fixture
def seen(tmp_path: Path) -> dict[str, Any]:
    """Return what the script saw as one process, with a user's sitecustomize on the path."""
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), environment().get("PYTHONPATH", "")])
    found: dict[str, Any] = json.loads(
        subprocess.run(
            [sys.executable, "-m", "zero_engine", "run", str(SCRIPT), "--help", "-m", "x"],
            env={**environment(), "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
            timeout=600,
            check=True,
        ).stdout
    )
    return found


def test_script_and_its_children_find_deepspeed_as_one_module(seen: dict[str, Any]) -> None:
    expected = {
        "is found": True,
        "version": "0.19.8",
        "__version__": "0.19.8",
        "packages": True,
        "finding it imports torch": False,
        "one module": True,
        "arguments": ["--help", "-m", "x"],
        "child": "zero_engine.deepspeed",
        "hidden sitecustomize": "was run",
        "instance": False,  # of a class that is not served
    }
    assert {name: seen[name] for name in expected} == expected
    assert seen["nonsense"].startswith("ModuleNotFoundError: ")
    for use, name in {
        "call": "pipe.LayerSpec",
        "subclass": "pipe.PipelineModule",
        "attribute": "moe.layer.MoE",
        "top level": "init_inference",
    }.items():
        assert seen[use].startswith("NotServedError: ")
        assert name in seen[use]
        assert reason_to_refuse(name) in seen[use]


def test_a_library_whose_release_is_not_known_is_imported_as_it_is(tmp_path, monkeypatch, caplog):
    place = tmp_path / "pytorch_lightning" / "strategies"
    place.mkdir(parents=True)
    for folder in (place.parent, place):
        (folder / "__init__.py").touch()
    (place / "deepspeed.py").write_text("value = 7", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    name = "pytorch_lightning.strategies.deepspeed"
    install()
    assert importlib.import_module(name).value == 7
    assert [record.getMessage().split(" ", 1)[0] for record in caplog.records] == [name]
    for imported in [n for n in sys.modules if n.partition(".")[0] == "pytorch_lightning"]:
        del sys.modules[imported]


def test_a_release_whose_loading_takes_other_arguments_is_not_mended() -> None:
    def load(load_config: object, model: object) -> None:
        pass

    module = ModuleType("transformers.core_model_loading")
    vars(module)["convert_and_load_state_dict_in_model"] = load
    with pytest.raises(ImportError, match=r"takes \['load_config', 'model'\], expected"):
        mend_loading(module)
    assert vars(module)["convert_and_load_state_dict_in_model"] is load


def test_ranks_communicate_and_the_exit_code_is_the_failing_ranks() -> None:
    # New interpreters are given the hook in test_accelerate_launch.
    ranks = {"PYTHON_EXEC": forked_python()}
    done = run_program("run", "--nproc-per-node=2", str(SCRIPT), expected_code=7, more=ranks)
    # Of two ranks, whose lines of Gloo in torch 2.10 may run into each other.
    said = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(said) == 2, done.stdout


def test_script_runs_in_place_where_the_process_is_a_rank_already(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, importlib.metadata as m\nprint(os.getpid(), m.version('deepspeed'))"
    )
    started = subprocess.Popen(
        [sys.executable, "-m", "zero_engine", "run", str(script)],
        env={**environment(), "RANK": "0", "WORLD_SIZE": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = started.communicate(timeout=600)
    assert output.split() == [str(started.pid), "0.19.8"]


def test_process_without_the_hook_is_untouched() -> None:
    spec = importlib.util.find_spec("deepspeed")
    assert spec is None or "zero_engine" not in str(spec.origin)


def test_torchrun_options_are_refused_for_a_program_that_starts_ranks(monkeypatch):
    for name in ("PYTHONPATH", "PATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    with pytest.raises(ValueError, match=r"--nproc-per-node was given.*accelerate"):
        run_script(["--nproc-per-node=2", "accelerate", "launch", "train.py"])


def test_hooks_folders_stand_in_front_once() -> None:
    once = hooked({"PYTHONPATH": "/a", "PATH": "/b"})
    assert once["PYTHONPATH"] == os.pathsep.join([str(ON_PATH), "/a"])
    assert hooked(once) == once
