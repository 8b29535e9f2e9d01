"""ZeroTrainer beside transformers' own Trainer, which trains under DDP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hf_ranks
import pytest

from zero_core.testing import spawn


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks have left, by program."""
    place = tmp_path_factory.mktemp("trainings")
    spawn(hf_ranks.on_two_ranks, 2, str(place))
    return place


def _found(folder: Path, world_size: int = 2) -> list[Any]:
    """What each rank found."""
    return [json.loads((folder / f"found-{r}.json").read_text()) for r in range(world_size)]


def _column(rows: list[dict[str, float]], key: str) -> Any:
    return [row[key] for row in rows]


@pytest.mark.parametrize("zero", hf_ranks.STAGES)
def test_steps_are_those_of_the_plain_trainer_under_ddp(folder: Path, zero: str) -> None:
    for found in _found(folder / "train_all"):
        plain, rows = found["plain"], found[zero]["history"]
        # An epoch of 5 batches per rank, of which 2 make a step: the third step has one.
        assert len(rows) == len(plain) == 6
        assert _column(rows, "loss") == pytest.approx(_column(plain, "loss"), abs=2e-6)
        norms = _column(plain, "grad_norm")
        assert min(norms) < 0.8 < max(norms)  # some are clipped
        assert _column(rows, "grad_norm") == pytest.approx(norms, rel=1e-5)
        assert _column(rows, "learning_rate") == _column(plain, "learning_rate")
        assert found[zero]["gap"] < 1e-6
        counts = {"pre_optimizer_step": 6, "optimizer_step": 6, "substep_end": 4}
        assert found[zero]["counts"] == counts


@pytest.mark.parametrize("case", ["twice", "unclipped"])
def test_steps_are_the_same_when_trained_again_and_without_clipping(
    folder: Path, case: str
) -> None:
    for found in _found(folder / "train_all"):
        plain, rows = found[case]["plain"], found[case]["zero"]
        assert len(rows) == 6
        assert _column(rows, "loss") == pytest.approx(_column(plain, "loss"), abs=5e-6)
        norms = _column(plain, "grad_norm")
        assert _column(rows, "grad_norm") == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_low_precision_is_the_engines(folder: Path, precision: str, dtype: str) -> None:
    for found in _found(folder / "train_all"):
        assert found[precision]["dtype"] == f"torch.{dtype}"
        rows, plain = found[precision]["history"], found["plain"]
        assert _column(rows, "loss")[:2] == pytest.approx(_column(plain, "loss")[:2], abs=0.05)
        assert all(("loss_scale" in row) == (precision == "fp16") for row in rows)


def test_training_resumes_on_another_world_size_and_stage(folder: Path) -> None:
    place = folder / "train_all"
    plain = _found(place)[0]["plain"]
    spawn(hf_ranks.resume, 1, str(place))
    (found,) = _found(place / "resumed", 1)
    for key in ("step", "loss", "learning_rate"):
        assert _column(found, key) == pytest.approx(_column(plain, key), abs=1e-5)


def test_t5_generates_and_evaluates_as_the_plain_trainer(folder: Path) -> None:
    for found in _found(folder / "generate"):
        assert found["zero"][0] != found["zero"][1]
        for zero, plain in zip(found["zero"], found["plain"], strict=True):
            assert zero == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize("name", ["zero", "weights alone"])
def test_lora_trains_and_loads_its_best_checkpoint(folder: Path, name: str) -> None:
    for found in _found(folder / "adapt"):
        zero, plain = found[name], found["plain"]
        assert zero["best_step"] == plain["best_step"] < zero["last_step"]
        assert zero["best"] == pytest.approx(plain["best"], abs=1e-5)
        assert zero["loaded"] == pytest.approx(zero["best"], abs=1e-6)
        assert zero["gap"] < 1e-5
