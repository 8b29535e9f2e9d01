"""Train a GPT-2 on plain text. Copy this file as the start of your own program.

The program uses ZeRO by `zero_core.deferred_init`, `zero_core.build` and methods of the engine.
``train_batch`` runs backward and the update, so that ``accumulation_schedule`` may choose the order
of a step's work. The model is an ordinary transformers model.

A `TrainingRun` manages ranks, folder, text and logs. A copy of this file imports it from
`zero_engine`. ``zero-engine train`` runs this program under torchrun on every rank.
"""

from __future__ import annotations

import os

# No download from a model hub: the model is made from a config, the tokenizer from the text.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import signal
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

import zero_core
from zero_engine.progress import working
from zero_engine.train.training_run import Corpus, RunSettings, Start, TrainingRun, open_run


def train(options: Mapping[str, Any], start: Start = Start.NEW) -> int:
    """Run the whole program on this rank. See `open_run`. Every rank must call it.

    Returns the exit code: 0, or 128 + signal if a signal ended the run early.
    """
    with open_run(options, start) as run:
        stop = train_in(run)
    return 0 if stop is None else 128 + stop


def train_in(run: TrainingRun) -> signal.Signals | None:
    """Train, and write the results. Returns the signal that ended the run early, if any."""
    make_deterministic(run.settings.seed, run.device)
    # Deferred, so that no rank needs memory for the whole model here.
    with working("making the model"), zero_core.deferred_init():
        model = build_model(run.settings, run.corpus.vocab_size)
    engine = zero_core.build(model, run.config)  # build() shows its own progress
    engine.should_defer_sigint = False  # the run's stop request handles SIGINT
    client_state = None
    if run.is_resumed or engine.config.memory_checkpoint is not None:
        with working("loading the checkpoint"):
            client_state = engine.resume(run.checkpoints, last_step=run.last_finished_step)
    first_step = run.first_step(client_state)
    with run.logged(engine, model, first_step):
        stop = run_steps(engine, run, first_step)
        if stop is None:
            run.export(engine, model)
        engine.close()
        run.say_farewell(stop)
    return stop


def run_steps(engine: zero_core.Engine, run: TrainingRun, step: int) -> signal.Signals | None:
    """Train from ``step`` to the end or to a stop request, and save checkpoints concurrently.

    Returns the signal that ended the run early, if any. A failed save raises ZeroError at the next
    save, or at the end.
    """
    settings, stop, save = run.settings, None, None
    if step == 0:
        evaluate(engine, run, step)
    while step < settings.steps and stop is None:
        run.begin_step()
        learning_rate = engine.optimizer.param_groups[0]["lr"]
        loss = take_step(engine, run.corpus, step)
        step += 1
        stop = run.end_step(engine, step, loss, learning_rate)
        if step % settings.eval_every == 0 or step == settings.steps:
            evaluate(engine, run, step)
        if settings.is_save_due(step) or (settings.save and stop is not None):
            save = engine.async_save(
                run.checkpoints,
                client_state=run.client_state(step),
                keep_last=settings.keep_last,
                max_copy_bytes=run.max_copy_bytes,
            )
    if save is not None:
        run.doing("saving the checkpoint")
        save.result()
    return stop


def take_step(engine: zero_core.Engine, corpus: Corpus, step: int) -> Tensor:
    """Take one optimizer step.

    Returns the sum of the losses of this rank's micro-batches: 0-dim, float64, on the device. In
    float64 the mean over all ranks hardly depends on how samples are spread over the ranks.
    """
    losses: list[Tensor] = []
    first = step * engine.gradient_accumulation_steps
    batches = (
        corpus.batch(
            first + micro_step,
            rank=engine.rank,
            world_size=engine.world_size,
            micro_batch_size=engine.train_micro_batch_size_per_gpu,
        ).to(engine.device)
        for micro_step in range(engine.gradient_accumulation_steps)
    )

    def compute_loss(ids: Tensor) -> Tensor:
        loss: Tensor = engine(input_ids=ids, labels=ids, use_cache=False).loss
        losses.append(loss.detach())
        return loss

    engine.train_batch(batches, compute_loss, client_state={"step": step + 1})
    # If "auto" repeats a failed vertical step with the horizontal schedule, only that pass counts.
    return torch.stack(losses[-engine.gradient_accumulation_steps :]).to(torch.float64).sum()


@torch.no_grad()
def evaluate(engine: zero_core.Engine, run: TrainingRun, step: int) -> None:
    """Log the mean loss on held-out text. Every rank must call it."""
    engine.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for ids in run.corpus.held_out_batches(
        run.settings.eval_windows,
        rank=engine.rank,
        world_size=engine.world_size,
        micro_batch_size=engine.train_micro_batch_size_per_gpu,
    ):
        ids = ids.to(engine.device)
        sums[0] += engine(input_ids=ids, labels=ids, use_cache=False).loss
        sums[1] += 1
    engine.train()
    run.log_held_out(step, sums)


def build_model(settings: RunSettings, vocab_size: int) -> GPT2LMHeadModel:
    """Make a GPT-2 of the given size with random weights. Token 0 is the end of a text."""
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=settings.context,
        n_embd=settings.width,
        n_layer=settings.layers,
        n_head=settings.heads,
        resid_pdrop=0.0,  # a short run hardly repeats text, so it does not overfit
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        architectures=[GPT2LMHeadModel.__name__],
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # avoids a warning: transformers falls back to this value
    return model


def make_deterministic(seed: int, device: torch.device) -> None:
    """Make repeated runs bit-identical, as far as torch has deterministic kernels."""
    torch.manual_seed(seed)  # every rank must start from the same weights
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Deterministic mode fills new memory with NaN, which takes time and has no effect here.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(train({}))
