"""Train a GPT-2 on plain text. Copy this file as the start of your own program.

The copy still imports data, settings, metrics and artifacts from `zero_engine.train`, and ranks and
memory from `zero_engine`, which stays installed.

Everything that concerns ZeRO is in five calls: `zero_core.build`, then ``engine(...)``,
``engine.train_batch``, ``engine.async_save`` and ``engine.resume``. ``train_batch`` runs backward
and the update, so that ``accumulation_schedule`` may choose the order of a step's work.
The model is an ordinary transformers model and knows nothing of it.

Start it with ``zero-engine train``, which runs it under torchrun on every rank.
"""

from __future__ import annotations

import os

# Nothing is fetched from a model hub: the model is made from a config, the tokenizer from the text.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

import zero_core
from zero_engine.launch.ranks import (
    StopRequest,
    from_first_rank,
    join_ranks,
    leave_ranks,
    on_first_rank,
    ranks_where,
    sum_over_ranks,
)
from zero_engine.machine import memory_limit_bytes, used_bytes
from zero_engine.progress import working
from zero_engine.train.artifacts import clear_run, export_for_transformers, plot_run, write_sample
from zero_engine.train.data import Corpus, prepare_corpus, read_text
from zero_engine.train.metrics import Reporter, StepRecord, last_finished_step
from zero_engine.train.options import RunSettings, Start
from zero_engine.train.products import has_16_bit_products, widen_products
from zero_engine.train.run_lock import (
    RunLock,
    belongs_to,
    launch_numbers,
    longest_wait_s,
    note_launch,
)
from zero_engine.train.settings import (
    RunFolder,
    engine_config,
    fill_auto,
    fresh_run,
    read_resolved,
    resumed_run,
    write_resolved,
)

COPY_SHARE = 1 / 8
"""Share of the host's memory that copies of states in a save may take. A step that needs more waits
for the writer."""


def train(options: Mapping[str, Any], start: Start = Start.NEW) -> int:
    """Run the whole program on this rank. Every rank calls it.

    Ranks that their launcher has started anew go on from the newest checkpoint, or from the copies
    in memory that ``memory_checkpoint`` keeps, whatever ``start`` is.

    Args:
        options: fields of `RunSettings`; None, or left out, means the default.
        start: how the run begins.

    Returns:
        The exit code: 0, or 128 + signal if a signal ended the run early.

    Raises:
        ZeroError: a setting, the data or a checkpoint is not usable.
    """
    device = join_ranks()
    folder = RunFolder.of(options)
    lock, launch = RunLock(folder), launch_numbers(device)

    agreed: dict[str, Any] = {"is_resumed": False}

    def prepare() -> None:
        lock.acquire(wait_s=longest_wait_s(start))
        is_again = belongs_to(folder, launch)
        has_checkpoint = folder.has_checkpoint and (is_again or start is Start.AUTO)
        if (has_checkpoint and folder.has_run) or (start is Start.RESUME and not is_again):
            agreed.update(run=asdict(resumed_run(options)), is_resumed=True)
        elif not is_again:  # otherwise all is prepared, and the states may be in memory
            settings = fresh_run(options, start)
            config, text = engine_config(settings), read_text(settings.data)
            clear_run(folder, keeps_checkpoints=has_checkpoint)
            agreed["is_resumed"] = has_checkpoint  # of a machine that was replaced
            write_resolved(folder, settings, config=config)
            sizes = {"vocab_size": settings.vocab, "context": settings.context}
            with working("preparing the text"):
                prepare_corpus(text, folder.data, **sizes)
        note_launch(folder, launch)
        resolved = read_resolved(folder)
        agreed.update(config=resolved["config"], run=agreed.get("run", resolved["run"]))

    on_first_rank(prepare, device)
    request = StopRequest()  # from now on a signal waits for the next step's end
    # Rank 0 alone has looked: another machine may see the folder as it was before.
    agreed = json.loads(from_first_rank(json.dumps(agreed), device))
    settings, should_resume = RunSettings(**agreed["run"]), bool(agreed["is_resumed"])
    folder = RunFolder(folder.root, settings.checkpoints)
    stop = train_in(
        folder, settings, agreed["config"], device, request, should_resume=should_resume
    )
    leave_ranks()
    lock.release()
    return 0 if stop is None else 128 + stop


def train_in(
    folder: RunFolder,
    settings: RunSettings,
    config: dict[str, Any],
    device: torch.device,
    request: StopRequest,
    *,
    should_resume: bool,
) -> signal.Signals | None:
    """Train the run that is prepared in ``folder``, and leave the results there.

    ``config`` is the engine's configuration as the user wrote it.

    Returns:
        The signal that ended the run early, if one did.
    """
    corpus = open_corpus(folder.data, settings.seed, device)
    make_deterministic(settings.seed, device)
    with working("making the model"), zero_core.deferred_init():  # never whole on any rank
        model = build_model(settings, corpus.vocab_size)
    engine = zero_core.build(model, fill_auto(config, settings.steps))  # shows its own progress
    engine.should_defer_sigint = False  # `StopRequest` is the only handler, and raises nothing
    client_state = None
    if should_resume or engine.config.memory_checkpoint is not None:
        last_step = last_finished_step(folder, settings)
        with working("loading the checkpoint"):
            client_state = engine.resume(folder.checkpoint, last_step=last_step)
    text = None if client_state is None else client_state.get("sha256_of_text")
    if text not in (None, corpus.sha256_of_text):
        raise zero_core.ConfigError(
            f"--data: the run whose checkpoints are in {folder.checkpoint} learned from another "
            "text or vocabulary: give the same, or other --checkpoints"
        )
    first_step = 0 if client_state is None else int(client_state["step"])
    if settings.steps < first_step:
        raise zero_core.ConfigError(
            f"--steps {settings.steps}: the run has taken {first_step} already"
        )

    with ExitStack() as stack:
        stack.enter_context(engine.record(folder.records))
        reporter = None
        if engine.rank == 0:
            write_resolved(
                folder,
                settings,
                config=config,
                engine=engine.config.model_dump(mode="json"),
                model=model.config.to_dict(),
                world_size=engine.world_size,
                sha256_of_text=corpus.sha256_of_text,
            )
            reporter = stack.enter_context(
                Reporter(folder, settings, first_step=first_step, place=engine.place)
            )
            if first_step == settings.steps:
                reporter.say(f"all {first_step} steps were taken before: --steps moves the end")
            elif first_step:
                reporter.say(f"goes on after step {first_step}")
        stop = run_steps(engine, corpus, settings, reporter, folder, request, first_step)
        if stop is None:
            if reporter and settings.export:
                reporter.doing("exporting the model")
            if settings.export:
                export_for_transformers(engine, model, folder)
            if settings.sample_tokens != 0:
                write_sample(engine, model, corpus, folder, settings.sample_tokens)
        engine.close()
        if reporter:
            plot_run(folder)
            reporter.say(farewell(folder, settings, stop))
    return stop


def open_corpus(folder: Path, seed: int, device: torch.device) -> Corpus:
    """Open the text that rank 0 has prepared. Every rank calls it.

    Raises:
        ConfigError: on all ranks, if one of them finds no text or another one than rank 0.
    """
    corpus: Corpus | None = None
    with suppress(FileNotFoundError):
        corpus = Corpus.open(folder, seed=seed)
    text = "none" if corpus is None else corpus.sha256_of_text
    of_first = from_first_rank(text, device)
    others = ranks_where(corpus is None or text != of_first, device)
    if corpus is None or others:
        raise zero_core.ConfigError(
            f"{folder} has no text, or another one than on rank 0, on ranks {others}: give all "
            "ranks the same folder"
        )
    return corpus


def run_steps(
    engine: zero_core.Engine,
    corpus: Corpus,
    settings: RunSettings,
    reporter: Reporter | None,
    folder: RunFolder,
    request: StopRequest,
    step: int,
) -> signal.Signals | None:
    """Train from ``step`` to the end or to a stop request, and save a checkpoint there.

    Without `RunSettings.save` there is none. Checkpoints are written beside the next steps. The
    last one is there at the end.

    Returns:
        The signal that ended the run early, if one did.

    Raises:
        ZeroError: a save failed. It is raised at the next save, or at the end.
    """
    stop, save = None, None
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    memory = memory_limit_bytes()
    copied = None if memory is None else int(COPY_SHARE * memory / num_local)
    if settings.size is not None:
        copied = 0  # the plan has no memory for a second copy of anything
    if step == 0:
        evaluate(engine, corpus, settings, reporter, step)
    while step < settings.steps and stop is None:
        started_at, learning_rate = time.perf_counter(), engine.optimizer.param_groups[0]["lr"]
        loss = take_step(engine, corpus, step)
        step += 1
        # One small sum carries all that ranks exchange after a step. Here the host reads it.
        held = [0.0] * engine.world_size
        held[engine.rank] = float(used_bytes(engine.device))
        shared = [0.0, *request.as_flags(), *held]
        is_accelerated = engine.device.type != "cpu"
        sent = torch.tensor(shared, dtype=torch.float64, pin_memory=is_accelerated)
        sums = sent.to(engine.device, non_blocking=True)
        sums[0] = loss
        with engine.place.waiting("sum of losses"):
            total_loss, *sums_of_flags_and_memory = sum_over_ranks(sums).tolist()
        stop = StopRequest.from_flags(sums_of_flags_and_memory[: len(StopRequest.HANDLED)])
        if reporter:
            num_tokens = engine.config.train_batch_size * settings.context
            record = StepRecord(
                step=step,
                loss=total_loss / (engine.world_size * engine.gradient_accumulation_steps),
                learning_rate=learning_rate,
                grad_norm=engine.get_global_grad_norm(),
                loss_scale=engine.loss_scale,
                tokens_per_s=num_tokens / (time.perf_counter() - started_at),
                memory_bytes=[int(m) for m in sums_of_flags_and_memory[-engine.world_size :]],
            )
            with engine.place.during("logs of the step"):
                reporter.step(record)
        if step % settings.eval_every == 0 or step == settings.steps:
            evaluate(engine, corpus, settings, reporter, step)
        if settings.is_save_due(step) or (settings.save and stop is not None):
            save = engine.async_save(
                folder.checkpoint,
                client_state={"step": step, "sha256_of_text": corpus.sha256_of_text},
                keep_last=settings.keep_last,
                max_copy_bytes=copied,
            )
    if save is not None:
        if reporter:
            reporter.doing("saving the checkpoint")
        save.result()
    return stop if step < settings.steps else None  # a run that is complete was not stopped


def take_step(engine: zero_core.Engine, corpus: Corpus, step: int) -> Tensor:
    """Take one optimizer step.

    Returns:
        The sum of the losses of this rank's micro-batches: 0-dim, float64, on the device, not read
        yet. It is exact, so that the mean over all ranks does not depend on how many there are.
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
    # "auto" computes a step again horizontally if the model refuses the vertical schedule.
    last = losses[-engine.gradient_accumulation_steps :]
    return torch.stack(last).to(torch.float64).sum()


@torch.no_grad()
def evaluate(
    engine: zero_core.Engine,
    corpus: Corpus,
    settings: RunSettings,
    reporter: Reporter | None,
    step: int,
) -> None:
    """Report the mean loss on held-out text. Every rank takes a part of it."""
    engine.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for ids in corpus.held_out_batches(
        settings.eval_windows,
        rank=engine.rank,
        world_size=engine.world_size,
        micro_batch_size=engine.train_micro_batch_size_per_gpu,
    ):
        ids = ids.to(engine.device)
        sums[0] += engine(input_ids=ids, labels=ids, use_cache=False).loss
        sums[1] += 1
    loss, num_batches = sum_over_ranks(sums).tolist()
    engine.train()
    if reporter:
        reporter.held_out(step, loss / num_batches)


def build_model(settings: RunSettings, vocab_size: int) -> GPT2LMHeadModel:
    """Make a GPT-2 of the given size with random weights. Token 0 is the end of a text."""
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=settings.context,
        n_embd=settings.width,
        n_layer=settings.layers,
        n_head=settings.heads,
        resid_pdrop=0.0,  # a short run sees each text once: there is nothing to overfit
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        architectures=[GPT2LMHeadModel.__name__],
    )
    model = GPT2LMHeadModel(config)
    if settings.size is not None and not torch.cuda.is_available() and not has_16_bit_products():
        widen_products(model)
    model.loss_type = "ForCausalLM"  # what transformers falls back to, with a warning
    return model


def make_deterministic(seed: int, device: torch.device) -> None:
    """Let equal runs give equal bits: what a resumed run is held to."""
    torch.manual_seed(seed)  # on every rank, so that all start from the same weights
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
        # Deterministic mode fills new memory with NaN: that costs time and changes nothing here.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def farewell(folder: RunFolder, settings: RunSettings, stop: signal.Signals | None) -> str:
    root = shlex.quote(str(folder.root))
    if stop is None:
        return f"done; results are in {root}; what limits the run: zero-engine report {root}"
    if not settings.save:
        return f"stopped by {stop.name}, without a checkpoint, as --no-save says"
    return (
        f"stopped by {stop.name}, checkpoint saved; continue with: "
        f"zero-engine train --resume --output {root}"
    )


if __name__ == "__main__":
    sys.exit(train({}))
