"""The smaller zero-engine commands, and the exit code of every command."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from conftest import own_lines, run_here, run_program
from safetensors.torch import load_file
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from typer.testing import CliRunner

import zero_core
import zero_engine
from compat import releases
from zero_core.errors import (
    CheckpointError,
    CheckpointFailedError,
    CollectiveError,
    ConfigError,
    RankMismatchError,
)
from zero_engine import doctor
from zero_engine.cli import app, main
from zero_engine.launch.ranks import fail
from zero_engine.launch.torchrun import _exit_code
from zero_engine.machine import available_cores, memory_limit_bytes
from zero_engine.progress import working
from zero_engine.train.launch import rank_environment
from zero_engine.train.settings import engine_config, fill_auto


def test_config_prints_the_default_configuration() -> None:
    config = json.loads(run_here("config"))
    assert config["zero_optimization"] == {"stage": 1}  # and no other key
    assert config["bf16"] == {"enabled": "auto"}
    assert engine_config(None, is_accelerated=True)["bf16"] == {"enabled": True}
    filled = engine_config(None, is_accelerated=False)
    engine = zero_core.build(nn.Linear(2, 2), fill_auto(filled, 10))
    assert engine.optimizer.param_groups[0]["lr"] > 0  # the first step changes something


def test_version_is_that_of_the_distribution() -> None:
    assert run_here("version") == run_here("--version")
    assert json.loads(run_here("version", "--json")) == {"version": zero_engine.__version__}
    (point,) = importlib.metadata.entry_points(group="console_scripts", name="zero-engine")
    assert point.load() is main
    for name in ("cpu_adam", "zero_comm", "zero_core", "zero_engine", "zero_offload"):
        found = importlib.metadata.version(name.replace("zero_engine", "zero_parts"))
        assert importlib.import_module(name).__version__ == found


def test_the_extra_all_has_every_extra_of_users_and_eight_packages_are_enough_without() -> None:
    file = Path(__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    of_users = sorted(extras.keys() - {"all", "bench", "verl"})  # verl pins releases
    assert extras["all"] == [f"zero-parts[{','.join(of_users)}]"]
    assert len(project["dependencies"]) <= 8


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [
        *(("train", name, "train") for name in ("transformers", "filelock", "tensorboard")),
        ("plan --layers=1", "transformers", "train"),
        ("plan --layers=1 --png=@/x.png", "matplotlib", "train"),
        *(("report @", name, "report") for name in ("jinja2", "vl_convert")),
    ],
)
def test_a_command_without_its_extra_ends_with_the_line_that_installs_it(
    command, module, extra, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, module, None)
    code, _, error = _run(*command.replace("@", str(tmp_path)).split())
    assert (code, error.count("\n")) == (2, 1)
    assert f"needs the package {module}, which is not installed: pip install" in error
    assert f"integration[{extra}]" in error


@pytest.mark.parametrize("words", ["--help", "config --schema", "verify @", "train --output=@/run"])
def test_a_command_prints_its_first_line_without_torch(words: str, saved: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "zero_engine"]
    command += words.replace("@", str(saved)).split()
    imported, pipe = [], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True) as program:
        for line in program.stdout:
            if not line.startswith("import time:"):
                break
            imported.append(line.split()[-1])
        program.kill()
    assert {"typer", "torch"} & {*imported} == {"typer"}
    assert "error" not in line


def _completed(monkeypatch: pytest.MonkeyPatch, request: str, words: str = "") -> None:
    asked = {"_ZERO_ENGINE_COMPLETE": request, "COMP_WORDS": words, "COMP_CWORD": "1"}
    for name, value in {**asked, "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["zero-engine"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell, monkeypatch, capsys):
    _completed(monkeypatch, f"source_{shell}")
    assert "_ZERO_ENGINE_COMPLETE=complete_" in capsys.readouterr().out
    if shell == "bash":
        _completed(monkeypatch, "complete_bash", "zero-engine ver")
        assert capsys.readouterr().out.split() == ["verify", "version"]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {}
    monkeypatch.setenv("TERM", "xterm")
    for is_terminal, rank in ((True, "0"), (True, "1"), (False, "0")):
        monkeypatch.setenv("RANK", rank)
        stream = _Terminal() if is_terminal else io.StringIO()
        with contextlib.redirect_stderr(stream), working("saving") as show:
            show(1, 2)
        shown[is_terminal, rank] = stream.getvalue()
    assert "saving" in shown.pop((True, "0"))
    assert set(shown.values()) == {""}


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        *((ConfigError, 2), (CheckpointError, 2), (CheckpointFailedError, 1)),
        *((CollectiveError, 1), (RankMismatchError, 1)),
    ],
)
def test_error_ends_a_rank_with_its_code_and_leaves_its_file(kind, code, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as ended:
        fail(kind("x"))
    assert ended.value.code == code
    written = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert written == f"{kind.__name__}: x"


def test_threads_are_shared_among_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero_engine.train.launch.available_cores", lambda: 8)
    assert rank_environment(2)["OMP_NUM_THREADS"] == "4"
    assert rank_environment(16)["OMP_NUM_THREADS"] == "1"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    engine = zero_core.build(nn.Linear(3, 2), config)
    for tag in ("step-0", "best"):
        engine.save_checkpoint(folder, tag)
    engine.close()
    return folder


def _run(*words: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def test_whole_checkpoint_is_verified_inspected_exported_and_damage_told(saved, tmp_path):
    code, text, _ = _run("verify", saved, "--json")
    assert (code, json.loads(text)["is_whole"]) == (0, True)
    code, text, _ = _run("inspect", saved, "--tag", "step-0", "--json")
    assert (code, json.loads(text)["elements"]) == (0, 8)
    assert "best" in _run("inspect", saved)[1]
    code, text, _ = _run("export", saved, tmp_path / "hf", "--dtype", "float16")
    assert (code, set(load_file(tmp_path / "hf" / "model.safetensors"))) == (0, {"weight", "bias"})
    assert "2 parameters, float16, " in _run("export", saved, tmp_path, "--dtype", "float16")[1]
    assert "is this engine's checkpoint already" in _run("import", saved, tmp_path / "no")[2]
    code, text, _ = _run("prune", saved, "--keep-last", 1, "--dry-run", "--json")
    assert (code, json.loads(text)["removed"]) == (0, [])
    path = saved / "best" / "buffers.safetensors"
    data = path.read_bytes()
    path.write_bytes(data + b"x")
    code, _, error = _run("verify", saved)
    assert (code, error.count("\n")) == (1, 1)
    assert "is damaged" in error
    assert json.loads(_run("verify", saved, "--json")[1])["is_corrupt"] is True
    path.write_bytes(data)


FAILING = """
import os, pathlib, subprocess, sys, time
if os.environ["RANK"] == "0":
    time.sleep(600)  # torchrun ends it
subprocess.run([sys.executable, "-c", "raise KeyError('of a child')"], check=False)
assert not pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).exists(), "a child wrote it"
raise ValueError("batch 7 is empty\\nof 9")
"""


def test_exception_of_one_rank_is_named_in_the_last_line(tmp_path: Path) -> None:
    script, error_file = tmp_path / "script.py", tmp_path / "error.json"
    script.write_text(FAILING, encoding="utf-8")
    done = run_program(
        *("run", "--nproc-per-node=2", str(script)),
        expected_code=1,
        more={"TORCHELASTIC_ERROR_FILE": str(error_file)},
    )
    lines = own_lines(done.stderr)
    assert lines[-1] == "rank 1 failed first, see above: ValueError: batch 7 is empty"
    assert sum("failed first" in line for line in lines) == 1
    assert lines.count("ValueError: batch 7 is empty") == 1, "the traceback is printed once"
    message = json.loads(error_file.read_text(encoding="utf-8"))["message"]
    assert message["message"] == "ValueError: batch 7 is empty\nof 9"
    assert message["errorCode"] == 1
    assert f'File "{script}", line 7' in message["extraInfo"]["py_callstack"]


@pytest.mark.parametrize("first", [0, 1])
def test_error_of_a_rank_goes_before_what_its_peers_say_in_the_same_second(first, tmp_path, capsys):
    failures = {}
    for rank in (0, 1):
        line = "OSError: disk" if rank == first else "CollectiveError: rank 0 is gone"
        path = tmp_path / f"{rank}.json"
        details = {"py_callstack": "...", "timestamp": "7"}
        path.write_text(json.dumps({"message": {"message": line, "extraInfo": details}}))
        failures[rank] = ProcessFailure(rank, 10 + rank, 1, str(path))
    assert _exit_code(ChildFailedError("script.py", failures)) == 1
    assert capsys.readouterr().err == f"rank {first} failed first, see above: OSError: disk\n"


def test_signal_is_named_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    failure = ProcessFailure(0, 10, -9, "no file")
    assert _exit_code(ChildFailedError("script.py", {0: failure})) == 137
    assert capsys.readouterr().err == "rank 0 was killed by SIGKILL\n"


def by_name() -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.examine()}


def test_doctor_finds_everything_and_shows_the_same_names_as_json() -> None:
    found = by_name()
    for name in ("zero-core", "zero-offload", "zero-comm", "cpu-adam", "torch", "gloo"):
        assert found[name].state == "ok", found[name]
    for group in doctor.ENTRY_POINTS:
        assert found[group].state == "ok", found[group]
    assert found["CPU Adam"].value.split()[0] in {"scalar", "avx2", "avx512", "neon"}
    assert found["CPU quantizer"].value == "native"
    findings = json.loads(run_here("doctor", "--json"))
    assert {"topic", "name", "value", "state", "advice"} == set(findings[0])
    table = run_here("doctor")
    for finding in findings:
        assert finding["name"] in table


def test_doctor_names_the_tested_release_of_this_build_and_python(monkeypatch, tmp_path):
    table, python = tmp_path / "table.json", f"{sys.version_info.major}.{sys.version_info.minor}"
    cells = {"nightly": {"builds": {}}, "torch": {"2.14.1": {"default": "cpu", "cpu": {}}}}
    table.write_text(json.dumps(cells), encoding="utf-8")
    for module, name in ((releases, "TABLE"), (doctor, "_RELEASES")):
        monkeypatch.setattr(module, name, table)
    monkeypatch.setattr(releases, "PAGE", tmp_path / "page.md")
    releases.PAGE.touch()
    monkeypatch.setattr(torch, "__version__", "2.14.3+cpu")
    assert "not tested together" in by_name()["release"].value
    for is_passed, state in ((True, "ok"), (False, "note")):
        releases.record("2.14.1", "cpu", python, is_passed=is_passed)
        found = by_name()["release"]
        assert f": torch 2.14.1 {'passed' if is_passed else 'failed'} tests on 20" in found.value
        assert found.state == state


def test_doctor_names_a_missing_and_a_broken_package_and_an_optional_library(monkeypatch, tmp_path):
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "zero-comm":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    finding = by_name()["zero-comm"]
    assert finding.state == "missing"
    assert finding.advice == "pip install zero-comm"
    monkeypatch.setitem(doctor.OPTIONAL, "a-library-of-few", "rare scripts")
    monkeypatch.setitem(doctor.PACKAGES, "cpu-adam", "a_module_that_is_not_there")
    (tmp_path / "asks_for_another.py").write_text("import importlib.metadata as m; m.version('-')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(doctor.PACKAGES, "zero-offload", "asks_for_another")
    found = by_name()
    optional, broken = found["a-library-of-few"], found["cpu-adam"]
    assert "but: PackageNotFoundError" in found["zero-offload"].value
    assert optional.state == "note"
    assert optional.advice == "pip install a-library-of-few, for rare scripts"
    assert broken.state == "missing"
    assert "ModuleNotFoundError" in broken.value


def test_doctor_says_what_devices_and_their_allocator_need(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "device of a rank" not in by_name() or torch.accelerator.device_count() > 1
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    found = by_name()
    expected = "8 devices: each rank takes the one of its local rank"
    assert found["device of a rank"].value == expected
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"].advice == "unset it, or set it to 8"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    advice = by_name()["device allocator"].advice
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in advice
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments: True")
    assert not by_name()["device allocator"].advice


def test_numa_nodes_are_listed_with_the_way_to_bind_ranks(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_NODES", tmp_path)
    assert by_name()["NUMA nodes"].value == "the system lists none"
    for node, cpus in enumerate(("0-2,8", "4")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    finding = by_name()["NUMA nodes"]
    assert finding.value == "0: CPUs 0-2,8; 1: CPUs 4"
    assert (finding.state, "torchrun --numa-binding" in finding.advice) == ("note", True)
    (tmp_path / "node2" / "cpulist").mkdir(parents=True)  # makes the read fail, even for root
    finding = by_name()["NUMA nodes"]
    assert finding.value.startswith("not readable: ")
    assert finding.state == "note"


@pytest.mark.parametrize(
    ("has_gpu", "limit", "words"),
    [
        (False, 2**23, ["0.00781 GiB", "for a GPU only"]),
        (True, 2**23, ["0.00781 GiB", "CUDA pins by itself"]),
        (True, None, ["unlimited"]),
    ],
)
def test_locked_memory_says_what_it_means_for_pin_memory(monkeypatch, has_gpu, limit, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(doctor, "locked_memory_limit_bytes", lambda: limit)
    finding = by_name()["lockable memory"]
    assert all(word in finding.value for word in words)
    assert (finding.state == "note") == (has_gpu and limit is not None)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({}, None),
    ],
)
def test_cpu_quota_of_a_container_counts(files, cores, tmp_path):
    (tmp_path / "cpu").mkdir()
    without_quota = available_cores(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert available_cores(tmp_path) == (cores or without_quota)


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_memory_limit_of_a_container_counts(name: str, tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    unlimited = memory_limit_bytes(tmp_path)
    (tmp_path / name).write_text("max")
    assert memory_limit_bytes(tmp_path) == unlimited
    (tmp_path / name).write_text("1048576")
    assert memory_limit_bytes(tmp_path) == 1048576
