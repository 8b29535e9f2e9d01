"""The smaller commands."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import json

import pytest
from conftest import run_here

import zero_engine
from zero_core.errors import (
    CheckpointError,
    CollectiveError,
    ConfigError,
    RankMismatchError,
)
from zero_engine.cli import main
from zero_engine.launch.ranks import fail
from zero_engine.progress import working
from zero_engine.train.launch import rank_environment


def test_config_prints_the_default_configuration() -> None:
    config = json.loads(run_here("config"))
    assert config["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "ratio": 0.5},
        "zero_quantized_weights": True,
    }


def test_version_is_that_of_the_distribution() -> None:
    assert run_here("version").strip() == zero_engine.__version__
    (point,) = importlib.metadata.entry_points(group="console_scripts", name="zero-engine")
    assert point.load() is main
    for name in ("cpu_adam", "zero_comm", "zero_core", "zero_engine", "zero_offload"):
        assert importlib.import_module(name).__version__ == importlib.metadata.version(name)


def test_the_extra_all_has_every_extra_of_users() -> None:
    found: dict[str, set[str]] = {}
    for text in importlib.metadata.requires("zero-engine") or []:
        what, _, extra = text.partition("; extra == ")
        found.setdefault(extra.strip("'\""), set()).add(what)
    assert found["all"] == found["hf"] | found["lightning"] | found["ray"]
    assert found.keys() - {"", "bench"} == {"all", "hf", "lightning", "ray"}


@pytest.mark.parametrize("verb", ["plan --layers=1", "doctor", "version"])
def test_reports_are_json_on_request(verb: str) -> None:
    assert json.loads(run_here(*verb.split(), "--json"))


def _completed(monkeypatch: pytest.MonkeyPatch, request: str, words: str = "") -> None:
    """Run ``zero-engine`` as a shell does for its completion."""
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
    """Only the first rank's stderr shows it."""
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
    [(ConfigError, 2), (CheckpointError, 2), (CollectiveError, 1), (RankMismatchError, 1)],
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
