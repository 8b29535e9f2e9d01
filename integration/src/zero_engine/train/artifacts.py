"""Results of a run besides its logs: the Hugging Face folder, a text sample, plots."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.models.gpt2 import GPT2LMHeadModel

import zero_core
from zero_core.checkpoint import LATEST, discard, list_checkpoints
from zero_engine.train.data import END_OF_TEXT, Corpus
from zero_engine.train.metrics import MIB, read_metrics
from zero_engine.train.settings import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def clear_run(folder: RunFolder, *, keeps_checkpoints: bool = False) -> None:
    """Remove what an earlier run left in ``folder``, and nothing else."""
    if not keeps_checkpoints and folder.has_checkpoint:  # beside which anything may lie
        (folder.checkpoint / LATEST).unlink()
        for tag in list_checkpoints(folder.checkpoint):
            discard(folder.checkpoint / tag)
    for path in (
        folder.data,
        folder.records,
        folder.tensorboard,
        folder.root / "checkpoint",
        folder.hf,
    ):
        shutil.rmtree(path, ignore_errors=True)
    for path in (folder.metrics, folder.sample, folder.loss_plot, folder.memory_plot):
        path.unlink(missing_ok=True)


def export_for_transformers(
    engine: zero_core.Engine, model: GPT2LMHeadModel, folder: RunFolder
) -> None:
    """Write a folder that ``from_pretrained`` of models and tokenizers loads.

    Every rank calls it.
    """
    engine.export_safetensors(folder.hf)
    if engine.rank == 0:
        model.config.save_pretrained(folder.hf)
        tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=_tokenizer(folder.data),
            bos_token=END_OF_TEXT,
            eos_token=END_OF_TEXT,
            pad_token=END_OF_TEXT,
            model_max_length=model.config.n_positions,
        )
        tokenizer.save_pretrained(folder.hf)


def write_sample(
    engine: zero_core.Engine,
    model: GPT2LMHeadModel,
    corpus: Corpus,
    folder: RunFolder,
    num_tokens: int | None = None,
) -> None:
    """Let the model continue the first held-out window's first quarter. Every rank calls it.

    ``num_tokens``: how many it writes; None: to the end of the context.
    """
    window = corpus.held_out[:1].long().to(engine.device)
    context = window.shape[1]
    prompt = window[:, : max(1, context // 4)]
    engine.eval()
    with engine.gathered(), torch.random.fork_rng():
        torch.manual_seed(corpus.seed)
        tokens = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            top_k=40,
            temperature=0.8,
            max_new_tokens=context - prompt.shape[1] if num_tokens is None else num_tokens,
        )
    engine.train()
    if engine.rank == 0:
        tokenizer = _tokenizer(folder.data)
        given = tokenizer.decode(prompt[0].tolist())
        written = tokenizer.decode(tokens[0, prompt.shape[1] :].tolist())
        text = f"--- given ---\n{given}\n--- written by the model ---\n{written}\n"
        folder.sample.write_text(text, encoding="utf-8")


def plot_run(folder: RunFolder) -> None:
    """Draw loss and memory over steps."""
    entries = read_metrics(folder.metrics)
    axes = _axes("loss (nats per token)")
    for key, label, style in (("loss", "training", "-"), ("held_out_loss", "held out", "o-")):
        points = [(entry["step"], entry[key]) for entry in entries if key in entry]
        axes.plot([x for x, _ in points], [y for _, y in points], style, label=label, markersize=4)
    _save(axes, folder.loss_plot)
    axes = _axes("memory (MiB)")
    points = [(entry["step"], entry["memory_bytes"]) for entry in entries if "loss" in entry]
    for rank in range(len(points[0][1]) if points else 0):
        values = [memory[rank] / MIB for _, memory in points if rank < len(memory)]
        axes.plot([x for x, memory in points if rank < len(memory)], values, label=f"rank {rank}")
    axes.set_ylim(bottom=0)
    _save(axes, folder.memory_plot)


def _axes(label: str) -> Axes:
    from matplotlib.figure import Figure  # every rank would import it, and rank 0 draws

    # A Figure of its own needs no display and leaves no state behind, as pyplot would.
    axes = Figure(figsize=(8, 4.5), layout="constrained").add_subplot()
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(visible=True, alpha=0.3)
    return axes


def _save(axes: Axes, path: Path) -> None:
    from matplotlib.figure import Figure

    if axes.get_lines():
        axes.legend()
    figure = axes.figure
    assert isinstance(figure, Figure)
    figure.savefig(path, dpi=120)


def _tokenizer(data: Path) -> Tokenizer:
    return Tokenizer.from_file(str(data / "tokenizer.json"))
