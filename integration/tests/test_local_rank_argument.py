"""``zero-engine run`` gives ``--local_rank=N`` to scripts that declare it, and to no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import environment, run_program

from zero_engine.script.local_rank import declares_local_rank, source_of

# As DeepSpeed-Chat's programs begin.
DECLARES = """
import argparse, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--epochs", type=int)
args = parser.parse_args()
sys.stdout.write(f"{os.environ['LOCAL_RANK']} {args.local_rank} {args.epochs}\\n")
"""
DOES_NOT = '''
"""It would end at --local_rank."""
import argparse, sys
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
sys.stdout.write(f"{parser.parse_args().epochs}\\n")  # not --local_rank
'''


def _write(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _run_as_rank(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``zero-engine run`` in a process that is rank 5, the second of its machine."""
    return subprocess.run(
        [sys.executable, "-m", "zero_engine", "run", *arguments],
        env={**environment(), "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_each_rank_is_given_its_own_number(tmp_path: Path) -> None:
    script = _write(tmp_path, DECLARES)
    done = run_program("run", "--nproc-per-node=2", str(script), "--epochs", "3")
    assert sorted(done.stdout.splitlines()) == ["0 0 3", "1 1 3"]


def test_script_in_a_process_that_is_a_rank_is_given_its_number(tmp_path: Path) -> None:
    assert _run_as_rank(str(_write(tmp_path, DECLARES))).stdout == "1 1 None\n"


def test_script_that_does_not_declare_it_is_not_given_it(tmp_path: Path) -> None:
    done = _run_as_rank(str(_write(tmp_path, DOES_NOT)), "--epochs=3")
    assert done.stdout == "3\n", done.stderr


@pytest.mark.parametrize(
    ("text", "options", "output"),
    [(DECLARES, ["--no-local-rank"], "1 -1 None\n"), (DOES_NOT, ["--local-rank"], "")],
)
def test_option_decides_whatever_the_script_declares(
    tmp_path: Path, text: str, options: list[str], output: str
) -> None:
    assert _run_as_rank(*options, str(_write(tmp_path, text))).stdout == output


def test_number_that_the_user_gives_is_kept(tmp_path: Path) -> None:
    done = _run_as_rank(str(_write(tmp_path, DECLARES)), "--local_rank=7")
    assert done.stdout == "1 7 None\n"


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("from options import parser", "options.py"),
        ("import package.options", "package/options.py"),
        ("from package import options", "package/options.py"),
        ("from package import parser", "package/__init__.py"),
    ],
)
def test_option_may_be_declared_by_a_module_beside_the_script(
    tmp_path: Path, line: str, file: str
) -> None:
    script = _write(tmp_path, line)
    assert not declares_local_rank(script)
    _write(tmp_path, DECLARES, file)
    assert declares_local_rank(script)


def test_module_beside_the_script_that_is_not_imported_does_not_count(tmp_path: Path) -> None:
    _write(tmp_path, DECLARES, "other.py")
    assert not declares_local_rank(_write(tmp_path, DOES_NOT))


def test_module_is_found_as_python_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = _write(tmp_path, DECLARES, "package/__main__.py")
    assert source_of("package", is_module=True) == program
    assert source_of("package.missing", is_module=True) is None
