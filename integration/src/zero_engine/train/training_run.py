"""Training run without its loop: ranks, folder, text, stop requests, logs and results.

`program` has the loop. Every rank must call the functions here, except `clear_run` and `plot_run`,
which only rank 0 calls. Rank 0 writes logs and results.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.models.gpt2 import GPT2LMHeadModel

import zero_core
from zero_core.checkpoint import LATEST, discard, list_checkpoints, newest_step
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
from zero_engine.train.data import END_OF_TEXT, Corpus, prepare_corpus, read_text
from zero_engine.train.metrics import MIB, Reporter, StepRecord, read_metrics
from zero_engine.train.options import RunSettings, Start
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

__all__ = ["Corpus", "RunSettings", "Start", "TrainingRun", "open_corpus", "open_run"]

COPY_SHARE = 1 / 8
"""Largest share of the host's memory for copies of states during a save."""


class TrainingRun:
    """Training run whose folder is prepared.

    Attributes:
        config: the engine's configuration, after `fill_auto` (the constructor takes it before).
        checkpoints: folder or URL of the checkpoints.
        max_copy_bytes: limit of the copy of a rank's states for a save; None for no limit.
    """

    def __init__(
        self,
        folder: RunFolder,
        settings: RunSettings,
        config: dict[str, Any],
        device: torch.device,
        request: StopRequest,
        *,
        is_resumed: bool,
    ) -> None:
        self.settings = settings
        self.device = device
        self.corpus = open_corpus(folder.data, settings.seed, device)
        self.config = fill_auto(config, settings.steps)
        self.checkpoints = folder.checkpoint
        self.is_resumed = is_resumed
        memory = memory_limit_bytes()
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.max_copy_bytes = None if memory is None else int(COPY_SHARE * memory / num_local)
        self._folder = folder
        self._given = config
        self._request = request
        self._reporter: Reporter | None = None
        self._step_began_at = 0.0

    @property
    def last_finished_step(self) -> int:
        """Last step whose evaluation and checkpoint, if due, are complete."""
        path, settings = self._folder.metrics, self.settings
        entries = read_metrics(path) if path.exists() else []
        step = max((entry["step"] for entry in entries if "loss" in entry), default=0)
        is_last = step == settings.steps
        is_evaluated = any("held_out_loss" in entry for entry in entries if entry["step"] == step)
        lacks_evaluation = (is_last or step % settings.eval_every == 0) and not is_evaluated
        lacks_save = settings.is_save_due(step) and newest_step(self.checkpoints) < step
        return step - 1 if lacks_evaluation or lacks_save else step

    def client_state(self, step: int) -> dict[str, Any]:
        return {"step": step, "sha256_of_text": self.corpus.sha256_of_text}

    def first_step(self, client_state: Mapping[str, Any] | None) -> int:
        if client_state is None:
            return 0
        if client_state.get("sha256_of_text") not in (None, self.corpus.sha256_of_text):
            raise zero_core.ConfigError(
                f"--data: the run whose checkpoints are in {self.checkpoints} learned from another "
                "text or vocabulary: give the same, or other --checkpoints"
            )
        step = int(client_state["step"])
        if self.settings.steps < step:
            raise zero_core.ConfigError(
                f"--steps {self.settings.steps}: the run has taken {step} already"
            )
        return step

    @contextmanager
    def logged(
        self, engine: zero_core.Engine, model: GPT2LMHeadModel, first_step: int
    ) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(engine.record(self._folder.records))
            if engine.rank == 0:
                write_resolved(
                    self._folder,
                    self.settings,
                    config=self._given,
                    engine=engine.config.model_dump(mode="json"),
                    model=model.config.to_dict(),
                    world_size=engine.world_size,
                    sha256_of_text=self.corpus.sha256_of_text,
                )
                reporter = Reporter(
                    self._folder, self.settings, first_step=first_step, place=engine.place
                )
                self._reporter = stack.enter_context(reporter)
                if first_step == self.settings.steps:
                    reporter.say(f"all {first_step} steps were taken before: --steps moves the end")
                elif first_step:
                    reporter.say(f"goes on after step {first_step}")
            yield
        self._reporter = None

    def begin_step(self) -> None:
        self._step_began_at = time.perf_counter()

    def end_step(
        self, engine: zero_core.Engine, step: int, loss: Tensor, learning_rate: float
    ) -> signal.Signals | None:
        """Log a step. Returns the signal that requests an early stop, if any.

        ``loss`` is the sum over this rank's micro-batches: 0-dim, float64, on the device.
        """
        # One small all-reduce has all values that ranks exchange after a step.
        held = [0.0] * engine.world_size
        held[engine.rank] = float(used_bytes(engine.device))
        shared = [0.0, *self._request.as_flags(), *held]
        sent = torch.tensor(shared, dtype=torch.float64, pin_memory=engine.device.type != "cpu")
        sums = sent.to(engine.device, non_blocking=True)
        sums[0] = loss
        with engine.place.waiting("sum of losses"):
            total_loss, *flags_and_memory = sum_over_ranks(sums).tolist()
        if self._reporter:
            num_tokens = engine.config.train_batch_size * self.settings.context
            record = StepRecord(
                step=step,
                loss=total_loss / (engine.world_size * engine.gradient_accumulation_steps),
                learning_rate=learning_rate,
                grad_norm=engine.get_global_grad_norm(),
                loss_scale=engine.loss_scale,
                tokens_per_s=num_tokens / (time.perf_counter() - self._step_began_at),
                memory_bytes=[int(nbytes) for nbytes in flags_and_memory[-engine.world_size :]],
            )
            with engine.place.during("logs of the step"):
                self._reporter.step(record)
        if step == self.settings.steps:
            return None
        return StopRequest.from_flags(flags_and_memory[: len(StopRequest.HANDLED)])

    def log_held_out(self, step: int, sums: Tensor) -> None:
        loss, num_batches = sum_over_ranks(sums).tolist()
        if self._reporter:
            self._reporter.held_out(step, loss / num_batches)

    def doing(self, what: str) -> None:
        if self._reporter:
            self._reporter.doing(what)

    def export(self, engine: zero_core.Engine, model: GPT2LMHeadModel) -> None:
        if self.settings.export:
            self.doing("exporting the model")
            export_for_transformers(engine, model, self._folder)
        if self.settings.sample_tokens != 0:
            write_sample(engine, model, self.corpus, self._folder, self.settings.sample_tokens)

    def say_farewell(self, stop: signal.Signals | None) -> None:
        if self._reporter is None:
            return
        plot_run(self._folder)
        root = shlex.quote(str(self._folder.root))
        if stop is None:
            text = f"done; results are in {root}; what limits the run: zero-engine report {root}"
        elif not self.settings.save:
            text = f"stopped by {stop.name}, without a checkpoint, as --no-save says"
        else:
            text = (
                f"stopped by {stop.name}, checkpoint saved; continue with: "
                f"zero-engine train --resume --output {root}"
            )
        self._reporter.say(text)


@contextmanager
def open_run(options: Mapping[str, Any], start: Start) -> Iterator[TrainingRun]:
    """Join the ranks and prepare the run. ``options`` are fields of `RunSettings`.

    Restarted ranks continue from the newest checkpoint, or from the copies in memory of
    ``memory_checkpoint``, whatever ``start`` is.
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
            agreed.update(run=resumed_run(options).model_dump(), is_resumed=True)
        elif not is_again:  # otherwise the folder is prepared, and states may be in memory
            settings = fresh_run(options, start)
            text, is_accelerated = read_text(settings.data), device.type != "cpu"
            config = engine_config(settings.config, is_accelerated=is_accelerated)
            clear_run(folder, keeps_checkpoints=has_checkpoint)
            agreed["is_resumed"] = has_checkpoint  # a new machine resumes the old one's checkpoints
            write_resolved(folder, settings, config=config)
            sizes = {"vocab_size": settings.vocab, "context": settings.context}
            with working("preparing the text"):
                prepare_corpus(text, folder.data, **sizes)
        note_launch(folder, launch)
        resolved = read_resolved(folder)
        agreed.update(config=resolved["config"], run=agreed.get("run", resolved["run"]))

    on_first_rank(prepare, device)
    request = StopRequest()  # from now on a signal takes effect at the next step's end
    # Other machines may still see an old state of the folder, so use rank 0's result.
    agreed = json.loads(from_first_rank(json.dumps(agreed), device))
    settings = RunSettings(**agreed["run"])
    folder = RunFolder(folder.root, settings.checkpoints)
    yield TrainingRun(
        folder, settings, agreed["config"], device, request, is_resumed=agreed["is_resumed"]
    )
    # Not in a `finally`: after an error, leave_ranks() could wait for ranks that hang.
    leave_ranks()
    lock.release()


def open_corpus(folder: Path, seed: int, device: torch.device) -> Corpus:
    """Open the text that rank 0 has prepared. Fails on all ranks if it differs on one of them."""
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


def clear_run(folder: RunFolder, *, keeps_checkpoints: bool = False) -> None:
    """Remove an earlier run's results from ``folder``, and its checkpoints unless they are kept."""
    if not keeps_checkpoints and folder.has_checkpoint:  # the folder may have other files
        for tag in list_checkpoints(folder.checkpoint):
            discard(folder.checkpoint / tag)
        with suppress(FileNotFoundError):
            (folder.checkpoint / LATEST).unlink()
    own = folder.root / "checkpoint"
    for path in (folder.data, folder.records, folder.tensorboard, own, folder.hf):
        shutil.rmtree(path, ignore_errors=True)
    for path in (folder.metrics, folder.sample, folder.loss_plot, folder.memory_plot):
        path.unlink(missing_ok=True)


def export_for_transformers(
    engine: zero_core.Engine, model: GPT2LMHeadModel, folder: RunFolder
) -> None:
    """Write a folder for ``from_pretrained`` of models and tokenizers. Every rank must call it."""
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
    """Let the model continue the first quarter of a held-out window. Every rank must call it."""
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
    from matplotlib.figure import Figure  # only rank 0 draws, so other ranks need no matplotlib

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
        # Unlike pyplot, a Figure needs no display and leaves no global state.
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
