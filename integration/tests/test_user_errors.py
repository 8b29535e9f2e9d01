"""Mistakes of users, reported in one line that names the option and the remedy."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from conftest import refusal_of, run_program
from torch.multiprocessing import ProcessExitedException

import zero_core
from benchmarks.harness.forked_python import forked_python
from faults.configurations.malformed_configurations import malformed_configurations
from zero_core import check_config
from zero_core.errors import CheckpointError, ConfigError
from zero_core.testing import run_alone
from zero_engine.launch.ranks import fail
from zero_engine.train.data import read_text
from zero_engine.train.settings import RunSettings, Start, engine_config, fill_auto, fresh_run


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, r"some\.txt: expected a text file, found nothing"),
        (b" \n", "the file is empty"),
        ("abc é".encode("latin-1"), r"not UTF-8 text \(byte 4"),
    ],
)
def test_data_that_cannot_be_read_is_refused(
    content: bytes | None, match: str, tmp_path: Path
) -> None:
    path = tmp_path / "some.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=match):
        read_text(str(path))
    with pytest.raises(ConfigError, match="found a folder"):
        read_text(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "--steps 0: must be at least 1"),
        ({"vocab": 100}, "--vocab 100: must be at least 257"),
        ({"width": 100, "heads": 3}, "--width 100 must be a multiple of --heads 3"),
        ({"eval_every": -1}, "--eval-every -1: must be at least 1"),
    ],
)
def test_senseless_setting_is_refused(
    options: dict[str, int], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        fresh_run({"output": str(tmp_path / "new"), **options}, Start.NEW)


def test_output_folder_of_something_else_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="holds no run"):
        fresh_run({"output": str(tmp_path)}, Start.OVERWRITE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        ('{"a": 1, "a": 2}', "duplicate key 'a'"),
    ],
)
def test_config_that_is_no_object_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        engine_config(RunSettings(config=str(path)))


def test_auto_schedule_follows_the_number_of_steps() -> None:
    params = {"warmup_num_steps": "auto", "total_num_steps": "auto", "cos_min_ratio": 0.1}
    filled = fill_auto({"scheduler": {"type": "WarmupCosineLR", "params": params}}, 400)
    assert filled["scheduler"]["params"] == {
        "warmup_num_steps": 80,
        "total_num_steps": 400,
        "cos_min_ratio": 0.1,
    }


def test_mistake_is_one_line_without_traceback(tmp_path: Path) -> None:
    config = tmp_path / "zero.json"
    config.write_text('{"train_batch_size": 8, "zero_optimisation": {"stage": 3}}')
    said = refusal_of("train", f"--config={config}", f"--output={tmp_path / 'run'}")
    assert "did you mean 'zero_optimization'" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_mistake_found_on_the_ranks_is_said_once(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("a few words\n")
    output = tmp_path / "run"
    command = ("train", f"--data={path}", f"--output={output}")
    done = run_program(*command, expected_code=2, more={"PYTHON_EXEC": forked_python()})
    assert "too short for one window of 128" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    fresh_run({"output": str(output)}, Start.NEW)  # nothing there to be kept


def test_malformed_configurations_are_refused_with_one_line_that_names_the_key() -> None:
    """Every eleventh one is tried here.

    `nox -s faults` tries all of them, also from files and with DeepSpeed's reader.
    """
    tried = [c for c in malformed_configurations() if isinstance(c.content, dict)][::11]
    for case in tried:
        with pytest.raises(ConfigError) as refused:
            check_config(case.content, world_size=2)
        said = str(refused.value)
        assert case.key in said, case.name
        assert len(said.splitlines()) == 1, said
    assert len(tried) > 100


def _end_by_a_checkpoint(folder: str, is_save: bool) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    engine = zero_core.build(torch.nn.Linear(3, 3), config)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if not is_save:
            engine.load_checkpoint(folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # as a full disk
        engine.save_checkpoint(folder)
    except CheckpointError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        fail(error)


@pytest.mark.parametrize(("is_save", "code"), [(True, 1), (False, 2)])
def test_full_disk_may_pass_and_a_missing_checkpoint_does_not(
    is_save: bool, code: int, tmp_path: Path
) -> None:
    with pytest.raises(ProcessExitedException) as ended:
        run_alone(_end_by_a_checkpoint, str(tmp_path), is_save)
    assert ended.value.exit_code == code
