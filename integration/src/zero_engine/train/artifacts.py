"""Results of a run besides its logs: the Hugging Face folder, a text sample, plots."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

import zero_core
from zero_engine.train.data import END_OF_TEXT, Corpus
from zero_engine.train.metrics import read_metrics
from zero_engine.train.plots import plot_loss, plot_memory
from zero_engine.train.settings import RunFolder


def clear_run(folder: RunFolder) -> None:
    """Remove what an earlier run left in ``folder``, and nothing else."""
    for path in (folder.data, folder.tensorboard, folder.checkpoint, folder.hf):
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
    engine: zero_core.Engine, model: GPT2LMHeadModel, corpus: Corpus, folder: RunFolder
) -> None:
    """Let the model continue the first held-out window's first quarter. Every rank calls it."""
    window = corpus.held_out[:1].long().to(engine.device)
    context = window.shape[1]
    prompt = window[:, : max(1, context // 4)]
    engine.eval()
    with engine.gathered(), torch.random.fork_rng():
        torch.manual_seed(corpus.seed)
        tokens = model.generate(  # type: ignore[misc]
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            top_k=40,
            temperature=0.8,
            max_new_tokens=context - prompt.shape[1],
        )
    engine.train()
    if engine.rank == 0:
        tokenizer = _tokenizer(folder.data)
        given = tokenizer.decode(prompt[0].tolist())
        written = tokenizer.decode(tokens[0, prompt.shape[1] :].tolist())
        text = f"--- given ---\n{given}\n--- written by the model ---\n{written}\n"
        folder.sample.write_text(text, encoding="utf-8")


def plot_run(folder: RunFolder) -> None:
    """Draw ``loss.png`` and ``memory.png`` from the metrics log."""
    entries = read_metrics(folder.metrics)
    plot_loss(entries, folder.loss_plot)
    plot_memory(entries, folder.memory_plot)


def _tokenizer(data: Path) -> Tokenizer:
    return Tokenizer.from_file(str(data / "tokenizer.json"))
