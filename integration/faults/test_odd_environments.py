"""An environment that nobody thought of: training ends with the same bits, or resumes to them."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.harness import END_S, Program
from zero_engine.train.metrics import read_metrics
from zero_engine.train.settings import RunFolder

STEPS = 12
OPTIONS = (
    *("--layers=1", "--width=32", "--heads=2", "--context=32", "--vocab=300", "--ranks=1"),
    *(f"--steps={STEPS}", "--eval-every=12", "--eval-windows=8", "--save-every=4"),
)


def _command(output: Path, *options: str) -> tuple[str, ...]:
    return ("-m", "zero_engine", "train", *OPTIONS, f"--output={output}", *options)


def _train(output: Path, shell: str = "exec {}", *options: str) -> str:
    """Train under a shell's line, in which ``{}`` is the command, and return what was said."""
    words = shlex.join([sys.executable, *_command(output, *options)])
    done = subprocess.run(
        ["bash", "-c", shell.format(words)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=END_S,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


def _weights(output: Path) -> bytes:
    return (RunFolder(output).hf / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in an environment as usual."""
    output = tmp_path_factory.mktemp("straight") / "run"
    _train(output)
    return output


SHELLS = {
    "asserts are left out": "PYTHONOPTIMIZE=2 exec {}",
    "text is ASCII": "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 exec {}",
    "no home": "unset HOME; exec {}",
    "the folder of temporary files is missing": "TMPDIR=/nonexistent exec {}",
    "the working folder is gone": "d=$(mktemp -d); cd $d; rmdir $d; exec {}",
    "standard input is closed": "exec {} <&-",
    "standard output is closed": "exec {} >&-",
    "standard output and error are closed": "exec {} >&- 2>&-",
    "nobody reads the output": "{} | true; exit ${{PIPESTATUS[0]}}",
    "the disk of the output is full": "exec {} > /dev/full",
    "few descriptors": "ulimit -n 128; exec {}",
    "files are for their owner alone": "umask 077; exec {}",
    "a stack of 1 MiB": "ulimit -s 1024; exec {}",
}


@pytest.mark.parametrize("shell", SHELLS.values(), ids=SHELLS.keys())
def test_training_has_the_same_bits_where(shell: str, straight: Path, tmp_path: Path) -> None:
    _train(tmp_path / "run", shell)
    assert _weights(tmp_path / "run") == _weights(straight)


@pytest.mark.parametrize("name", ["a b", "ü ä", 'it\'s "so" $HOME', "-x", "x" * 200])
def test_training_has_the_same_bits_in_a_folder_called(
    name: str, straight: Path, tmp_path: Path
) -> None:
    _train(tmp_path / name)
    assert _weights(tmp_path / name) == _weights(straight)


def _half(output: Path) -> None:
    """Train until a signal ends it after some steps."""
    with Program(*_command(output)) as program:
        program.wait_for(lambda: _last_step(output) >= 4)
        os.kill(program.pid, signal.SIGTERM)
        program.end()


def _last_step(output: Path) -> int:
    log = RunFolder(output).metrics
    return max((int(e["step"]) for e in read_metrics(log)), default=0) if log.exists() else 0


def _age(output: Path, when: float) -> None:
    for path in output.rglob("*"):
        os.utime(path, (when, when))


def _move(output: Path) -> None:
    copy = output.with_name("copy")
    shutil.copytree(output, copy)
    shutil.rmtree(output)
    copy.rename(output)


def _link(output: Path) -> None:
    place = output.with_name("elsewhere")
    output.rename(place)
    output.symlink_to(place)


MEANWHILE: dict[str, Callable[[Path], object]] = {
    "its files come from the future": lambda output: _age(output, 4e9),
    "its files have no age": lambda output: _age(output, 0.0),
    "it was copied": _move,
    "its folder is a link": _link,
    "its log is gone": lambda output: RunFolder(output).metrics.unlink(),
    "its log ends in the middle of a line": lambda output: os.truncate(
        RunFolder(output).metrics, RunFolder(output).metrics.stat().st_size - 9
    ),
    "its files are for reading alone": lambda output: [
        p.chmod(0o444) for p in RunFolder(output).checkpoint.rglob("*") if p.is_file()
    ],
    "a lock of a dead process is there": lambda output: RunFolder(output).lock.write_text("1"),
}


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that a signal has ended."""
    output = tmp_path_factory.mktemp("half") / "run"
    _half(output)
    return output


@pytest.mark.parametrize("happens", MEANWHILE.values(), ids=MEANWHILE.keys())
def test_a_stopped_run_is_continued_to_the_same_bits_although(
    happens: Callable[[Path], object], half: Path, straight: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    shutil.copytree(half, output)
    happens(output)
    _train(output, "exec {}", "--resume=auto")
    assert _weights(output) == _weights(straight)


@pytest.mark.parametrize(
    "signals",
    [
        (signal.SIGHUP,),
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL),
    ],
    ids=["its terminal closes", "Ctrl-C is pressed twice", "a scheduler loses patience"],
)
def test_a_run_goes_on_to_the_same_bits_after(
    signals: tuple[signal.Signals, ...], straight: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    with Program(*_command(output)) as program:
        program.wait_for(lambda: _last_step(output) >= 4)
        for number in signals:
            if not program.has_ended:
                os.kill(program.pid, number)
        program.end()
    _train(output, "exec {}", "--resume=auto")
    assert _weights(output) == _weights(straight)
