"""``zero-engine run`` gives ``--local_rank=N`` to scripts that declare it, and to no others."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import run_forked, run_program

from zero_engine.script.local_rank import OPTION, Source, declares, source_of

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


def test_each_rank_is_given_its_own_number(tmp_path: Path) -> None:
    script = _write(tmp_path, DECLARES)
    done = run_program("run", "--nproc-per-node=2", str(script), "--epochs", "3")
    assert sorted(done.stdout.splitlines()) == ["0 0 3", "1 1 3"]
    assert done.stderr.count("script.py declares --local_rank and is given it") == 1


@pytest.mark.parametrize(
    ("rank", "text", "before", "after", "output", "told"),
    [
        ("5", DECLARES, [], [], "1 1 None\n", ""),
        ("0", DOES_NOT, [], ["--epochs=3"], "3\n", "script.py is not given --local_rank"),
        ("5", DECLARES, ["--no-local-rank"], [], "1 -1 None\n", ""),
        ("5", DECLARES, [], ["--local_rank=7"], "1 7 None\n", ""),
        ("5", DOES_NOT, ["--local-rank"], [], "", "unrecognized arguments: --local_rank"),
    ],
)
def test_process_that_is_a_rank_gives_the_number_that_is_declared_or_asked_for(
    tmp_path: Path,
    rank: str,
    text: str,
    before: list[str],
    after: list[str],
    output: str,
    told: str,
) -> None:
    variables = {"RANK": rank, "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    script = str(_write(tmp_path, text))
    done = run_forked("run", *before, script, *after, more=variables)
    assert done.stdout == output, done.stderr
    assert told in done.stderr
    assert told or "local_rank" not in done.stderr, "rank 0 alone tells"


def _declares(script: Path) -> bool:
    return declares(Source(script, script.parent), OPTION)


@pytest.mark.parametrize(
    ("script", "package", "file"),
    [
        ("from options import parser", "", "options.py"),
        ("import package.options", "", "package/options.py"),
        ("import package.options", "", "package/__init__.py"),
        ("from package import options", "", "package/options.py"),
        ("from package import parser", "", "package/__init__.py"),
        ("import package", "from .options import parser", "package/options.py"),
        ("import package", "from . import options", "package/options.py"),
        ("import package", "from ..options import parser", "options.py"),
        ("import package", "from ..other import parser", "other/__init__.py"),
    ],
)
def test_option_may_be_declared_by_a_module_that_is_imported(tmp_path, script, package, file):
    path = _write(tmp_path, script)
    if package:
        _write(tmp_path, package, "package/__init__.py")
        _write(tmp_path, DOES_NOT, "package/unused.py")
    _write(tmp_path, DECLARES, "unrelated.py")
    assert not _declares(path)
    _write(tmp_path, DECLARES, file)
    assert _declares(path)


# As a program of transformers' HfArgumentParser.
FIELDS = """
import dataclasses, os
@dataclasses.dataclass(frozen=True)
class Options:
    local_rank: int = -1
"""


def test_field_of_a_dataclass_is_an_option_of_hugging_faces_parser(tmp_path: Path) -> None:
    script = _write(tmp_path, "from options import Options")
    _write(tmp_path, FIELDS, "options.py")
    assert not _declares(script), "nobody makes an option of it"
    _write(tmp_path, "from options import Options\nhf.HfArgumentParser(Options)")
    assert _declares(script)


def test_module_is_found_as_python_finds_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = _write(tmp_path, DECLARES, "package/__main__.py")
    assert source_of("package", is_module=True) == Source(program, tmp_path)
    assert source_of("package.missing", is_module=True) is None


def test_of_an_installed_module_its_own_package_alone_counts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    _write(tmp_path, DECLARES, "unrelated.py")
    _write(tmp_path, "import unrelated, package.options", "package/__main__.py")
    source = source_of("package", is_module=True)
    assert source is not None
    assert not declares(source, OPTION)
    _write(tmp_path, DECLARES, "package/options.py")
    assert declares(source, OPTION)
