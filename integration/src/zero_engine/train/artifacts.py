"""Results of a run besides its logs: the Hugging Face folder, a text sample, plots."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.models.gpt2 import GPT2LMHeadModel

import zero_core
from zero_core.checkpoint import LATEST, discard, list_checkpoints
from zero_engine.train.data import END_OF_TEXT, Corpus
from zero_engine.train.metrics import MIB, read_metrics
from zero_engine.train.settings import RunFolder


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
    from matplotlib.figure import Figure  # every rank would import it, and rank 0 draws

    entries = read_metrics(folder.metrics)
    losses = {
        name: [(entry["step"], entry[key]) for entry in entries if key in entry]
        for name, key in (("training", "loss"), ("held out", "held_out_loss"))
    }
    memory: dict[str, list[tuple[int, float]]] = {}
    for entry in entries:
        for rank, held in enumerate(entry.get("memory_bytes", ())):
            memory.setdefault(f"rank {rank}", []).append((entry["step"], held / MIB))
    for path, title, lines in (
        (folder.loss_plot, "loss (nats per token)", losses),
        (folder.memory_plot, "memory (MiB)", memory),
    ):
        # A Figure of its own needs no display and leaves no state behind, as pyplot would.
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        axes.set_xlabel("step")
        axes.set_ylabel(title)
        axes.grid(visible=True, alpha=0.3)
        for name, points in lines.items():
            style = "o-" if name == "held out" else "-"
            steps, values = zip(*points, strict=True) if points else ((), ())
            axes.plot(steps, values, style, label=name, markersize=4)
        if lines is memory:
            axes.set_ylim(bottom=0)
        if lines:
            axes.legend()
        figure.savefig(path, dpi=120)


def _tokenizer(data: Path) -> Tokenizer:
    return Tokenizer.from_file(str(data / "tokenizer.json"))
