"""Functions that run zero-engine, and fixtures, among them a finished run that tests share."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from filelock import FileLock
from torch.multiprocessing import ProcessExitedException
from typer.testing import CliRunner

from benchmarks.harness.forked_python import forked_python
from tests.support.ports import free_port
from zero_core.testing import preload, run_alone
from zero_core.testing.sampled_rows import (  # re-exported so that pytest finds the hook
    pytest_collection as pytest_collection,
)
from zero_core.testing.sampled_rows import (
    pytest_collection_modifyitems as pytest_collection_modifyitems,
)
from zero_core.testing.sampled_rows import pytest_runtestloop as pytest_runtestloop
from zero_engine.calibration import machine
from zero_engine.cli import app
from zero_engine.launch.torchrun import local_address_only
from zero_engine.presets import EXAMPLES, default_config_text
from zero_engine.train.settings import RunFolder

# Ranks fork from a server process that imports these modules once, which takes seconds.
preload(
    "benchmarks.harness.rank",
    "benchmarks.harness.train",
    "peft",
    "torch.distributed.fsdp",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
    "transformers.trainer_seq2seq",
    "zero_engine.train.program",
)

# Options of a run so small that most of its time is start-up.
TINY = (
    *("--layers=2", "--width=32", "--heads=2", "--context=32", "--vocab=300", "--ranks=2"),
    *("--eval-every=20", "--eval-windows=16", "--save-every=20"),
)
STEPS = 60
TIME_LIMIT_S = 600
CAPTURED: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 600, "check": False}
"""Arguments of `subprocess.run` for programs that may fail."""

Program = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def _no_kept_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "kept_path", lambda: Path("/nowhere/rates.json"))


def environment() -> dict[str, str]:
    """Return this process's environment with one thread per rank and without downloads."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run_program(
    *arguments: str, expected_code: int = 0, more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = run_forked(*arguments, more=more)
    assert done.returncode == expected_code, done.stdout + done.stderr
    return done


def own_lines(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if not line.startswith("[Gloo] ")]


def run_here(*arguments: str, expected_code: int = 0) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == expected_code, done.output
    return done.stdout


def refusal_of(*arguments: str) -> str:
    return run_program(*arguments, expected_code=2).stderr


def run_forked(
    *arguments: str, more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``zero-engine ARGUMENTS``, forked from a process that has imported its modules."""
    with tempfile.TemporaryDirectory() as folder:
        code = 0
        try:
            run_alone(_run_into, folder, arguments, {**environment(), **(more or {})})
        except ProcessExitedException as ended:
            code = ended.exit_code
        output, errors = (Path(folder, n).read_text(encoding="utf-8") for n in ("out", "err"))
    return subprocess.CompletedProcess(arguments, code, output, errors)


def _run_into(folder: str, arguments: tuple[str, ...], variables: dict[str, str]) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(variables)
    app(arguments)


def train_forked(*arguments: str, ranks: int = 2) -> None:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **local_address_only()}

    def train(rank: int) -> None:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        run_program("train", *arguments, more={**shared, **own})

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(train, range(ranks)))


@pytest.fixture(autouse=True)
def process_group_ends_with_the_test() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = Path(sysconfig.get_path("stdlib"))
    texts = [(root / f"{name}.py").read_text(encoding="utf-8") for name in ("argparse", "typing")]
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_options(text_file: Path) -> tuple[str, ...]:
    """Return options of a tiny run: the default config with stage 3, Twin-Flow and qwZ."""
    zero = {"zero_optimization": EXAMPLES["tour"]["zero_optimization"]}
    config = text_file.with_name("zero.json")
    config.write_text(json.dumps(json.loads(default_config_text()) | zero), encoding="utf-8")
    return (*TINY, f"--data={text_file}", f"--config={config}", f"--steps={STEPS}")


@pytest.fixture(scope="session")
def finished_run(
    tmp_path_factory: pytest.TempPathFactory, tiny_options: tuple[str, ...]
) -> tuple[RunFolder, str]:
    """Return a complete run and its output. xdist's workers share it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    root, said = shared / "finished run", shared / "finished run.txt"
    with FileLock(shared / "finished run.lock"):
        if not said.exists():
            ranks = {"PYTHON_EXEC": forked_python()}
            done = run_program("train", *tiny_options, f"--output={root}", more=ranks)
            said.write_text(done.stdout + done.stderr, encoding="utf-8")
    return RunFolder(root), said.read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def loggers() -> Iterator[tuple[str, ...]]:
    names = ("DeepSpeed", "zero_core", "zero_comm", "zero_engine", "zero_offload")
    found = [logging.getLogger(name) for name in (*names, "zero_core.optim.train_state", None)]
    before = [(one.level, one.propagate, [*one.handlers]) for one in found]
    levels = [(handler, handler.level) for one in found for handler in one.handlers]
    yield names
    for one, (level, propagate, handlers) in zip(found, before, strict=True):
        one.setLevel(level)
        one.propagate, one.handlers = propagate, handlers
    for handler, level in levels:  # also pytest's handlers
        handler.setLevel(level)
