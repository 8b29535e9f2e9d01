"""Settings of the train program: the options of ``zero-engine train``. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

MAX_SEED = 2**44
"""Largest seed whose multiples by epoch torch takes: see `zero_engine.train.data.Corpus.batch`."""


class Start(StrEnum):
    """Way in which a run begins: by ``--resume``, ``--resume auto``, ``--overwrite`` or neither."""

    NEW = "new"
    """In a folder that holds no run worth keeping."""
    OVERWRITE = "overwrite"
    """In the place of the run that the folder holds, if it holds one."""
    RESUME = "resume"
    """From the newest checkpoint, which must be there."""
    AUTO = "auto"
    """From the newest checkpoint, or as a new run if there is none."""

    @property
    def arguments(self) -> list[str]:
        """Arguments of the command line that say the same."""
        words = {Start.OVERWRITE: "--overwrite", Start.RESUME: "--resume"}
        words[Start.AUTO] = "--resume=auto"
        return [words[self]] if self in words else []


def flag_of(name: str) -> str:
    """Return the option that sets ``name``, a field of `RunSettings`."""
    return f"--{name.replace('_', '-')}"


def _setting(default: object, text: str, *, least: int | None = None) -> Any:
    """Return a field with the help of its option, and the smallest number that it may be."""
    return field(default=default, metadata={"help": text, "least": least})


@dataclass(frozen=True)
class RunSettings:
    """Settings of one run. The defaults finish within three minutes on two cores."""

    data: str | None = _setting(
        None, "UTF-8 text to learn from. Default: the Python standard library's source."
    )
    config: str | None = _setting(
        None, "DeepSpeed-style JSON. Default: what 'zero-engine config' prints."
    )
    steps: int = _setting(600, "Optimizer steps in all.", least=1)
    output: str = _setting("runs/stdlib-gpt2", "Folder for the results, new or of a run.")
    size: str | None = _setting(
        None, "Parameters, as 350m or 2.2b: a model as large as the memory, with its plan."
    )
    states: str | None = _setting(
        None, "With --size: memory or files. Default: memory, if the plan fits there."
    )
    layers: int = _setting(3, "Blocks of the model.", least=1)
    width: int = _setting(128, "Width of the model.", least=1)
    heads: int = _setting(4, "Attention heads.", least=1)
    context: int = _setting(128, "Tokens per sample.", least=2)
    vocab: int = _setting(512, "Size of the vocabulary to learn.", least=257)
    eval_every: int = _setting(100, "Steps between evaluations.", least=1)
    eval_windows: int = _setting(64, "Held-out samples per evaluation.", least=1)
    save: bool = _setting(True, "Whether checkpoints are saved. Without, a run cannot be resumed.")
    save_every: int = _setting(250, "Steps between checkpoints.", least=1)
    checkpoints: str | None = _setting(
        None, "Their folder or URL, as s3://bucket/run. Default: one in the output's."
    )
    keep_last: int = _setting(3, "Checkpoints that stay. Default: 3.", least=1)
    log_every: int = _setting(10, "Steps between lines without a terminal.", least=1)
    seed: int = _setting(0, "Seed of weights and data order.", least=0)
    sample_tokens: int | None = _setting(None, "Tokens that the trained model writes.", least=0)
    export: bool = _setting(True, "Whether the model is exported for transformers.")

    def is_save_due(self, step: int) -> bool:
        """Return whether a checkpoint follows a step, in a run that nobody stops."""
        return self.save and (step == self.steps or step % self.save_every == 0)

    def check(self) -> RunSettings:
        """Self, if every value makes sense.

        Raises:
            ConfigError: names the option and what it must be.
        """
        from zero_core.errors import ConfigError  # with torch, which takes seconds

        for setting in fields(self):
            value, least = getattr(self, setting.name), setting.metadata["least"]
            if None not in (value, least) and value < least:
                raise ConfigError(f"{flag_of(setting.name)} {value}: must be at least {least}")
        if self.seed > MAX_SEED:
            raise ConfigError(f"--seed {self.seed}: must be at most {MAX_SEED}")
        if self.width % self.heads:
            raise ConfigError(f"--width {self.width} must be a multiple of --heads {self.heads}")
        if self.sample_tokens is not None and self.sample_tokens > self.context - 1:
            raise ConfigError(
                f"--sample-tokens {self.sample_tokens}: must be below --context {self.context}"
            )
        if self.states not in (None, "memory", "files"):
            raise ConfigError(f"--states {self.states}: must be memory or files")
        if self.states is not None and (self.size is None or self.config is not None):
            raise ConfigError(f"--states {self.states} belongs to --size, without --config")
        return self
