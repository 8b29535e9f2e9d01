"""Files that the train program leaves behind, as others read them."""

from __future__ import annotations

import json
import re
import sysconfig
import time
from pathlib import Path

import pytest
import torch
from conftest import STEPS, TINY, train_forked
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

import zero_engine.train
from zero_core.errors import ConfigError
from zero_core.testing import spawn
from zero_core.watch.place import Place
from zero_engine.report.charts import loss_series
from zero_engine.report.run import read_run
from zero_engine.train import metrics, program
from zero_engine.train.data import Corpus, prepare_corpus
from zero_engine.train.metrics import read_metrics
from zero_engine.train.options import RunSettings
from zero_engine.train.settings import RunFolder

PNG_START = b"\x89PNG\r\n\x1a\n"


def _held_out_losses(folder: RunFolder) -> list[float]:
    return [e["held_out_loss"] for e in read_metrics(folder.metrics) if "held_out_loss" in e]


def _loss_of_exported_model(folder: RunFolder) -> float:
    """Return the held-out loss of the model that transformers loads from the run's folder."""
    model = AutoModelForCausalLM.from_pretrained(folder.hf).eval()
    windows = Corpus.open(folder.data, seed=0).held_out[:16].long()
    with torch.no_grad():
        return float(model(input_ids=windows, labels=windows).loss)


def test_run_leaves_every_promised_file(finished_run: tuple[RunFolder, str]) -> None:
    folder, _ = finished_run
    kept = [f"step-{STEPS - back}" for back in (40, 20, 0)]  # of a save every 20 steps
    assert sorted(path.name for path in folder.checkpoint.iterdir()) == ["latest", *kept]
    assert (folder.checkpoint / "latest").read_text() == kept[-1]
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (folder.hf / name).is_file(), name
    for picture in (folder.loss_plot, folder.memory_plot):
        assert picture.read_bytes().startswith(PNG_START), picture
    assert "written by the model" in folder.sample.read_text(encoding="utf-8")


def _open_each_its_own(rank: int, _world_size: int, folder: str) -> None:
    cpu = torch.device("cpu")
    same = program.open_corpus(Path(folder, "0"), 0, cpu)
    assert program.open_corpus(Path(folder, "same", str(rank)), 0, cpu).train.equal(same.train)
    for other in ("another", "missing"):
        with pytest.raises(ConfigError, match=r"on ranks \[1\]: give all ranks the same folder"):
            program.open_corpus(Path(folder, other, str(rank)), 0, cpu)


def test_all_ranks_refuse_a_text_that_one_of_them_has_not(tmp_path: Path) -> None:
    def prepare(text: str, *names: str) -> None:
        for name in names:
            prepare_corpus(text, tmp_path / name, vocab_size=260, context=8)

    prepare("one text of a few words " * 9, "0", "same/0", "same/1", "another/0", "missing/0")
    prepare("another text of some words " * 9, "another/1")
    spawn(_open_each_its_own, 2, str(tmp_path))


def test_a_report_reads_what_the_run_has_left(finished_run: tuple[RunFolder, str]) -> None:
    """Held-out losses are as printed and those of steps as logged, and all ranks have ended."""
    folder, output = finished_run
    run = read_run(folder.root)
    printed = re.findall(r"step (\d+)/\d+  held-out loss ([\d.]+)", output)
    assert [(str(step), f"{loss:.4f}") for step, loss in run.held_out] == printed
    assert len(printed) == 4
    logged = {e["step"]: e["loss"] for e in read_metrics(folder.metrics) if "loss" in e}
    assert dict(loss_series(run.ranks)) == pytest.approx(logged, rel=1e-6)
    assert [rank.end and rank.end.what for rank in run.ranks] == ["ended", "ended"]
    assert not run.failures


def test_output_has_a_line_of_figures_and_no_warnings(finished_run: tuple[RunFolder, str]) -> None:
    _, output = finished_run
    (line,) = [line for line in output.splitlines() if line.startswith(f"step 50/{STEPS}")]
    for figure in ("loss", "tokens/s", "MiB per rank", "lr", "scale"):
        assert figure in line
    assert "warning" not in output.lower()


def test_resolved_config_spells_defaults_out(finished_run: tuple[RunFolder, str]) -> None:
    resolved = json.loads(finished_run[0].resolved_config.read_text(encoding="utf-8"))
    engine, zero = resolved["engine"], resolved["engine"]["zero_optimization"]
    assert (zero["stage"], zero["zero_quantized_weights"]) == (3, True)
    assert zero["offload_optimizer"]["ratio"] == 0.5
    assert zero["offload_optimizer"]["pin_memory"] is True  # a default
    assert engine["train_batch_size"] == 8
    assert engine["scheduler"]["params"]["total_num_steps"] == STEPS
    run = (resolved["run"]["seed"], resolved["model"]["n_layer"], resolved["world_size"])
    assert run == (0, 2, 2)


def test_tensorboard_reads_the_same_losses(finished_run: tuple[RunFolder, str]) -> None:
    folder, _ = finished_run
    board = EventAccumulator(str(folder.tensorboard))
    board.Reload()
    logged = [event.value for event in board.Scalars("train/loss")]
    losses = [entry["loss"] for entry in read_metrics(folder.metrics) if "loss" in entry]
    assert logged == pytest.approx(losses)
    assert len(losses) == STEPS
    assert {"train/learning_rate", "train/tokens_per_s", "memory_mib/rank1", "held_out/loss"} <= (
        set(board.Tags()["scalars"])
    )


def test_transformers_loads_model_and_tokenizer(finished_run: tuple[RunFolder, str]) -> None:
    folder, _ = finished_run
    # The program computed with weights rounded to 8 bits; the export is not rounded.
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


def test_default_text_is_the_standard_library() -> None:
    from zero_engine.train.data import read_text

    text, root = read_text(None), Path(sysconfig.get_path("stdlib"))
    sources = [path.read_text(encoding="utf-8") for path in sorted(root.glob("[a-c]*.py"))]
    assert sum(source in text for source in sources) > len(sources) / 4  # the rest is cut off
    assert text == read_text(None)


def test_program_is_called_by_the_packages_name() -> None:
    assert zero_engine.train.train is program.train


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
