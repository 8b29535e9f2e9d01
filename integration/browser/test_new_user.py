"""A new user's path by the README's own commands, in their order.

A model is trained, killed and resumed, its report opened in a browser, a script of the Trainer run
on one rank and on two, killed, and resumed. ``nox -s "nightly(report)"`` runs this, with all
packages as a user installs them.
"""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from chromium import check_page
from transformers import AutoModelForCausalLM

from faults.harness import ENVIRONMENT, Program, last_step, weights
from tests.support.doc_blocks import ROOT, documented_arguments, find_blocks
from zero_engine.train.metrics import read_metrics
from zero_engine.train.settings import RunFolder

STEPS = 200
SMALL = (
    *(f"--steps={STEPS}", "--save-every=50", "--layers=2", "--width=64", "--heads=2"),
    *("--vocab=300", "--ranks=2"),
)
"""Added to the README's training, which takes minutes."""
COMMANDS = [
    line
    for block in find_blocks("bash")
    if block.page == ROOT / "README.md"
    for line in block.text.splitlines()
    if line.startswith("zero-engine ")
]


def _command(start: str) -> str:
    """Return the README's command that begins so."""
    (found,) = (line for line in COMMANDS if line.startswith(start))
    return found.partition("  #")[0]


def _run(command: str, folder: Path, *more: str) -> str:
    """Run a command in ``folder``, as its shell does. Returns what it prints."""
    words, _, target = command.partition(" > ")
    done = subprocess.run(
        [sys.executable, *documented_arguments(words), *more],
        cwd=folder,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if target:
        (folder / target.strip()).write_text(done.stdout, encoding="utf-8")
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the user's folder, with a text."""
    place = tmp_path_factory.mktemp("user")
    text = (Path(json.__file__).parent / "decoder.py").read_text(encoding="utf-8")
    (place / "my.txt").write_text(8 * text, encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def straight(folder: Path) -> RunFolder:
    """Train without a stop, elsewhere: the oracle."""
    _run(_command("zero-engine config"), folder)
    command = _command("zero-engine train --data").replace("runs/mine", "runs/undisturbed")
    _run(command, folder, *SMALL)
    return RunFolder(folder / "runs" / "undisturbed")


@pytest.fixture(scope="module")
def trained(folder: Path, straight: RunFolder) -> str:
    """Train, be killed between two checkpoints, resume, and return what the resumed run prints."""
    command = _command("zero-engine train --data")
    mine = RunFolder(folder / "runs" / "mine")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with Program(*documented_arguments(command), *SMALL) as program:
            program.wait_for(lambda: mine.has_checkpoint and last_step(mine) > 50)
            program.kill_all()
            program.end()
    assert 50 < last_step(mine) < STEPS
    assert not mine.hf.exists(), "it was killed too late"
    return _run(_command("zero-engine train --output"), folder)


@pytest.fixture(scope="module")
def page(folder: Path, trained: str) -> Path:
    """Return the report of the training, by the command that it ends with."""
    command = trained.splitlines()[-1].rpartition(": ")[2]
    assert command == _command("zero-engine report runs/mine").strip()
    said = _run(command, folder)
    found = re.search(r"^written to (.*): open it in a browser$", said, re.MULTILINE)
    assert found is not None
    text = (folder / found[1]).read_text(encoding="utf-8")
    assert said.splitlines()[0] in html.unescape(text)
    return folder / found[1]


def test_training_leaves_what_the_readme_names(folder: Path, trained: str) -> None:
    run = folder / "runs" / "mine"
    assert "done; results are in runs/mine" in trained
    names = ("config.resolved.json", "tensorboard", "loss.png", "checkpoint", "sample.txt")
    assert [name for name in names if not (run / name).exists()] == []
    assert AutoModelForCausalLM.from_pretrained(run / "hf").num_parameters() > 0


@pytest.mark.usefixtures("trained")
def test_run_resumed_after_a_kill_has_the_weights_of_one_without(
    folder: Path, straight: RunFolder
) -> None:
    mine = RunFolder(folder / "runs" / "mine")
    assert weights(mine) == weights(straight)
    numbers = [
        [(row["step"], row.get("loss")) for row in read_metrics(run.metrics)]
        for run in (mine, straight)
    ]
    assert numbers[0] == numbers[1]


@pytest.mark.usefixtures("trained")
def test_run_that_is_complete_says_so(folder: Path) -> None:
    said = _run(_command("zero-engine train --output"), folder)
    assert f"all {STEPS} steps were taken before: --steps moves the end" in said


@pytest.mark.parametrize(("theme", "width"), [("light", 1100), ("dark", 390)])
def test_report_is_drawn(page: Path, tmp_path: Path, theme: str, width: int) -> None:
    check_page(page, tmp_path, theme, width)


def test_report_knows_the_end(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<td>ended</td>" in text
    assert "no end was recorded" not in text


def test_own_script_trains_on_one_rank(folder: Path) -> None:
    _run(_command("zero-engine run integration/examples/hf_script.py"), folder)
    assert json.loads(_last_line(folder / "runs" / "one" / "records"))["what"] == "ended"
    model = AutoModelForCausalLM.from_pretrained(folder / "runs" / "one" / "model")
    assert model.num_parameters() > 0


def test_own_script_goes_on_with_the_same_bits_after_it_was_killed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks are killed between two checkpoints. The oracle is a run that was not."""
    command = _command("zero-engine run --nproc-per-node 2")
    _run(command.replace("runs/two", "runs/straight"), folder)
    monkeypatch.chdir(folder)
    two, straight = Path("runs", "two"), Path("runs", "straight")
    with Program(*documented_arguments(command)) as program:
        # The file that the Trainer writes last.
        program.wait_for((two / "checkpoint-100" / "trainer_state.json").is_file)
        program.kill_all()
        program.end()
    assert not (two / "model").exists(), "it was killed too late"
    _run(command, folder)
    assert _losses(two) == _losses(straight)
    parts = sorted((straight / "checkpoint-300" / "global_step300").glob("*.safetensors"))
    assert len(parts) > 4
    for part in [*parts, straight / "model" / "model.safetensors"]:
        assert (two / part.relative_to(straight)).read_bytes() == part.read_bytes(), part
    _run(_command("zero-engine report runs/two"), folder)
    assert "<td>resumed</td>" in (two / "report.html").read_text(encoding="utf-8")


def _last_line(records: Path) -> str:
    return (records / "steps-rank0.jsonl").read_text(encoding="utf-8").splitlines()[-1]


def _losses(run: Path) -> list[tuple[float, ...]]:
    state = json.loads((run / "checkpoint-300" / "trainer_state.json").read_text(encoding="utf-8"))
    rows = [row for row in state["log_history"] if "loss" in row]
    assert len(rows) == 30
    return [(row["step"], row["loss"], row["grad_norm"], row["learning_rate"]) for row in rows]
