"""The train program: its data, and its output files."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import STEPS, TINY, run_here, train_forked
from safetensors import SafetensorError
from support import fake_cuda
from support.fake_cuda.simulated import simulate_on_devices
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import zero_core
from zero_core.comm.place import Place
from zero_core.errors import ConfigError, ZeroError
from zero_core.testing import Case, Tower, rows, run_alone, spawn
from zero_engine.report.charts import loss_series
from zero_engine.report.run import read_run
from zero_engine.train import metrics
from zero_engine.train.data import Corpus, prepare_corpus
from zero_engine.train.metrics import read_metrics
from zero_engine.train.options import RunSettings, Start
from zero_engine.train.program import take_step
from zero_engine.train.settings import RunFolder, fresh_run, write_resolved
from zero_engine.train.training_run import open_corpus

PNG_START = b"\x89PNG\r\n\x1a\n"


def _held_out_losses(folder: RunFolder) -> list[float]:
    return [e["held_out_loss"] for e in read_metrics(folder.metrics) if "held_out_loss" in e]


def _loss_of_exported_model(folder: RunFolder) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder.hf).eval()
    windows = Corpus.open(folder.data, seed=0).held_out[:16].long()
    with torch.no_grad():
        return float(model(input_ids=windows, labels=windows).loss)


def test_run_leaves_its_files_figures_settings_and_losses(finished_run):
    folder, output = finished_run
    kept = [f"step-{STEPS - back}" for back in (40, 20, 0)]  # the run saved every 20 steps
    assert sorted(path.name for path in folder.checkpoint.iterdir()) == ["latest", *kept]
    assert (folder.checkpoint / "latest").read_text() == kept[-1]
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (folder.hf / name).is_file(), name
    for picture in (folder.loss_plot, folder.memory_plot):
        assert picture.read_bytes().startswith(PNG_START), picture
    assert "written by the model" in folder.sample.read_text(encoding="utf-8")
    (line,) = [line for line in output.splitlines() if line.startswith(f"step 20/{STEPS}  loss")]
    for figure in ("loss", "tokens/s", "MiB per rank", "lr", "scale"):
        assert figure in line
    assert "warning" not in output.lower()
    resolved = json.loads(folder.resolved_config.read_text(encoding="utf-8"))
    engine, zero = resolved["engine"], resolved["engine"]["zero_optimization"]
    assert (zero["stage"], zero["zero_quantized_weights"]) == (3, True)
    assert zero["offload_optimizer"]["ratio"] == 0.5
    assert zero["offload_optimizer"]["pin_memory"] is True
    assert engine["train_batch_size"] == 8
    assert engine["scheduler"]["params"]["total_num_steps"] == STEPS
    run = (resolved["run"]["seed"], resolved["model"]["n_layer"], resolved["world_size"])
    assert run == (0, 2, 2)
    board = EventAccumulator(str(folder.tensorboard))
    board.Reload()
    logged = [event.value for event in board.Scalars("train/loss")]
    losses = [entry["loss"] for entry in read_metrics(folder.metrics) if "loss" in entry]
    assert logged == pytest.approx(losses)
    assert len(losses) == STEPS
    assert {"train/learning_rate", "train/tokens_per_s", "memory_mib/rank1", "held_out/loss"} <= (
        set(board.Tags()["scalars"])
    )


def _open_each_its_own(rank: int, _world_size: int, folder: str) -> None:
    cpu = torch.device("cpu")
    same = open_corpus(Path(folder, "0"), 0, cpu)
    assert open_corpus(Path(folder, "same", str(rank)), 0, cpu).train.equal(same.train)
    for other in ("another", "missing"):
        with pytest.raises(ConfigError, match=r"on ranks \[1\]: give all ranks the same folder"):
            open_corpus(Path(folder, other, str(rank)), 0, cpu)


def test_all_ranks_refuse_a_text_that_one_of_them_has_not(tmp_path, monkeypatch) -> None:
    def prepare(text: str, *names: str) -> None:
        for name in names:
            prepare_corpus(text, tmp_path / name, vocab_size=260, context=8)

    prepare("one text of a few words " * 9, "0", "same/0", "same/1", "another/0", "missing/0")
    prepare("another text of some words " * 9, "another/1")
    spawn(_open_each_its_own, 2, str(tmp_path))
    full = SafetensorError("No space left on device")
    monkeypatch.setattr("zero_engine.train.data.save_file", Mock(side_effect=full))
    with pytest.raises(ZeroError, match=r"No space left on device. It takes .* are free there"):
        prepare("one text of a few words " * 9, "full")


def test_transformers_loads_the_model_and_a_report_reads_the_run(finished_run):
    folder, output = finished_run
    for words in ("verify", "inspect"):  # both accept the run's folder
        assert "step-" in run_here(words, str(folder.root))
    run = read_run(folder.root)
    printed = re.findall(r"step (\d+)/\d+  held-out loss ([\d.]+)", output)
    assert [(str(step), f"{loss:.4f}") for step, loss in run.held_out] == printed
    assert len(printed) == 4
    logged = {e["step"]: e["loss"] for e in read_metrics(folder.metrics) if "loss" in e}
    assert dict(loss_series(run.ranks)) == pytest.approx(logged, rel=1e-6)
    assert [rank.end and rank.end.what for rank in run.ranks] == ["ended", "ended"]
    assert not run.failures
    # Training rounded weights to 8 bits. The exported weights are unrounded.
    losses = _held_out_losses(folder)
    assert losses[-1] < 0.9 * losses[0]
    assert _loss_of_exported_model(folder) == pytest.approx(losses[-1], rel=0.02)
    tokenizer = AutoTokenizer.from_pretrained(folder.hf)
    text = "def café(x):\n\treturn  x  # ≤ 3\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_own_config_without_quantization_exports_the_computed_weights(tmp_path, text_file):
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    (tmp_path / "zero.json").write_text(json.dumps(config))
    folder = RunFolder(tmp_path / "run")
    own = (f"--config={tmp_path / 'zero.json'}", f"--output={folder.root}")
    train_forked(*TINY, *own, f"--data={text_file}", "--steps=6")
    losses = _held_out_losses(folder)
    assert _loss_of_exported_model(folder) == pytest.approx(losses[-1], rel=1e-5)
    resolved = json.loads(folder.resolved_config.read_text(encoding="utf-8"))
    assert resolved["engine"]["gradient_accumulation_steps"] == 2
    assert resolved["engine"]["gradient_clipping"] == 0.0


def test_long_computation_is_named_without_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(metrics, "QUIET_S", 0.1)
    place, folder = Place(), RunFolder(tmp_path)
    settings = RunSettings(steps=3)
    with metrics.Reporter(folder, settings, first_step=1, place=place):
        with place.during("forward of unit 3 (blocks.2)"):
            time.sleep(0.5)
        assert "after step 1/3: forward of unit 3 (blocks.2)" in capsys.readouterr().out
        time.sleep(0.3)
    assert capsys.readouterr().out == ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    text = "\n".join(f"line {i} of a text with {i * i} words" for i in range(2000))
    prepare_corpus(text, root, vocab_size=300, context=16)
    return root


def windows(corpus: Corpus, micro_steps: range, *, world_size: int, size: int) -> torch.Tensor:
    batches = [
        corpus.batch(step, rank=rank, world_size=world_size, micro_batch_size=size)
        for step in micro_steps
        for rank in range(world_size)
    ]
    return torch.cat(batches)


def test_order_depends_on_the_seed_and_the_windows_number_alone(folder: Path) -> None:
    one, other = Corpus.open(folder, seed=3), Corpus.open(folder, seed=3)
    for step in range(5):
        one.batch(step, rank=0, world_size=2, micro_batch_size=4)
    expected = one.batch(5, rank=1, world_size=2, micro_batch_size=4)
    assert torch.equal(other.batch(5, rank=1, world_size=2, micro_batch_size=4), expected)
    corpus = Corpus.open(folder, seed=0)
    alone = windows(corpus, range(6), world_size=1, size=4)
    assert torch.equal(windows(corpus, range(3), world_size=2, size=4), alone)
    batches = [
        Corpus.open(folder, seed=seed).batch(0, rank=0, world_size=1, micro_batch_size=8)
        for seed in (0, 1)
    ]
    assert not torch.equal(*batches)


def test_epoch_visits_each_window_but_held_out_ones_once_and_the_next_in_another_order(folder):
    corpus = Corpus.open(folder, seed=0)
    num_windows = len(corpus.train)
    two = windows(corpus, range(2 * num_windows), world_size=1, size=1)
    first, second = two[:num_windows], two[num_windows:]
    assert not torch.equal(first, second)
    for epoch in (first, second):
        assert sorted(epoch.tolist()) == sorted(corpus.train.tolist())
    corpus = Corpus.open(folder, seed=0)
    trained = {tuple(row) for row in corpus.train.tolist()}
    assert not trained & {tuple(row) for row in corpus.held_out.tolist()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_evaluates_equally_often(folder: Path, world_size: int) -> None:
    corpus = Corpus.open(folder, seed=0)
    counts = {
        len(list(corpus.held_out_batches(7, rank=rank, world_size=world_size, micro_batch_size=2)))
        for rank in range(world_size)
    }
    assert len(counts) == 1


def test_a_run_that_ended_without_a_checkpoint_is_not_replaced_unasked(tmp_path: Path) -> None:
    options = {"output": str(tmp_path / "run"), "save": False}
    folder = RunFolder.of(options)
    settings = fresh_run(options, Start.NEW)
    folder.root.mkdir()
    write_resolved(folder, settings, config={})
    fresh_run(options, Start.NEW)  # the earlier start wrote no result
    folder.loss_plot.touch()
    with pytest.raises(ConfigError, match="holds a run already"):
        fresh_run(options, Start.NEW)
    fresh_run(options, Start.OVERWRITE)


NUM_STEPS = 4


class Net(Tower):
    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(loss=super().forward(input_ids))


def _take_steps(ranks: Any) -> list[int]:
    engine = zero_core.build(Net(), Case(0, "bf16", 3, 1.0).config(), process_group=ranks)
    corpus: Any = SimpleNamespace(batch=lambda index, **_: rows(index, 0))
    counts = []
    for step in range(NUM_STEPS):
        fake_cuda.reset_counters(with_stacks=True)
        take_step(engine, corpus, step)
        kinds = [kind for kind, _ in fake_cuda.counters(ranks.device.index).stacks]
        counts.append(len(kinds) - kinds.count("copy"))  # uploads of batches do not count
    engine.close()
    return counts


def _run_the_program() -> None:
    ((counts),) = simulate_on_devices(_take_steps, 1)
    assert max(counts) <= 1, counts


@pytest.mark.cuda
def test_the_training_program_reads_no_loss_within_a_step() -> None:
    run_alone(_run_the_program)
