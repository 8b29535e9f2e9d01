"""Settings of the train program: the options of ``zero-engine train``. Imports no torch."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from zero_core.errors import ConfigError
from zero_engine.terminal import count

RESOLVED_CONFIG = "config.resolved.json"  # a run's settings, in its folder
MAX_SEED = 2**44
"""Largest seed that torch accepts after `zero_engine.train.data` multiplies it."""
_BOUNDS = {"greater_than_equal": "must be at least {ge}", "less_than_equal": "must be at most {le}"}
_Positive = Annotated[int, Field(ge=1)]


class Start(StrEnum):
    """Mode of a start: by ``--resume``, ``--resume auto``, ``--overwrite`` or none of these."""

    NEW = "new"
    """Start a run in a folder without one."""
    OVERWRITE = "overwrite"
    """Replace the folder's run, if any."""
    RESUME = "resume"
    """Continue from the newest checkpoint, which must exist."""
    AUTO = "auto"
    """Continue from the newest checkpoint, or start a new run if there is none."""


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def first_line(options: Mapping[str, Any], start: Start, ranks: int | None) -> str:
    """Check the options of a new run, without torch. Returns a line about the start."""
    given = {name: value for name, value in options.items() if value is not None}
    output = given.get("output", RunSettings().output)
    is_resumed = start in (Start.RESUME, Start.AUTO)
    unset = "as many ranks as before" if is_resumed else "a rank per GPU, or 2 on the CPU,"
    where = f"{unset if ranks is None else count(ranks, 'rank')} of {platform.node()}"
    if is_resumed:
        return f"continuing the run in {output}{', if any' * (start is Start.AUTO)}, on {where}"
    run = RunSettings.of(given)
    numel = 12 * run.layers * run.width**2 + (run.vocab + run.context) * run.width
    config = run.config or "of 'zero-engine config'"
    what = f"a GPT-2 of {numel / 1e6:.2g} M parameters, config {config}, output {output}"
    return f"{what}: starting {where}"


class RunSettings(BaseModel):
    """Settings of one run. The defaults train a small model in minutes on two cores."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    data: str | None = None
    """UTF-8 text to learn from. Default: the Python standard library's source."""
    config: str | None = None
    """DeepSpeed-style JSON. Default: what 'zero-engine config' prints."""
    steps: _Positive = 600
    """Optimizer steps in all."""
    output: str = "runs/stdlib-gpt2"
    """Folder for the results, new or of a run."""
    layers: _Positive = 3
    """Blocks of the model."""
    width: _Positive = 128
    """Width of the model."""
    heads: _Positive = 4
    """Attention heads."""
    context: Annotated[int, Field(ge=2)] = 128
    """Tokens per sample."""
    vocab: Annotated[int, Field(ge=257)] = 512
    """Size of the vocabulary to learn."""
    eval_every: _Positive = 100
    """Steps between evaluations."""
    eval_windows: _Positive = 64
    """Held-out samples per evaluation."""
    save: bool = True
    """Whether checkpoints are saved. Without, a run cannot be resumed."""
    save_every: _Positive = 250
    """Steps between checkpoints."""
    checkpoints: str | None = None
    """Their folder or URL, as s3://bucket/run. Default: one in the output's."""
    keep_last: _Positive = 3
    """Checkpoints that stay. Default: 3."""
    log_every: _Positive = 10
    """Steps between lines without a terminal."""
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = 0
    """Seed of weights and data order."""
    sample_tokens: Annotated[int | None, Field(ge=0)] = None
    """Tokens that the trained model writes."""
    export: bool = True
    """Whether the model is exported for transformers."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RunSettings:
        """Return the settings with ``values``. A wrong option raises ConfigError with its name."""
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
        said = first["msg"].removeprefix("Value error, ")
        if first["type"] in _BOUNDS:
            said = _BOUNDS[first["type"]].format(**first["ctx"])
        if first["loc"]:  # a single option's value is wrong
            said = f"{flag_of(str(first['loc'][0]))} {first['input']}: {said}"
        raise ConfigError(said)

    @model_validator(mode="after")
    def _check_together(self) -> RunSettings:
        if self.width % self.heads:
            raise ValueError(f"--width {self.width} must be a multiple of --heads {self.heads}")
        if self.sample_tokens is not None and self.sample_tokens > self.context - 1:
            raise ValueError(
                f"--sample-tokens {self.sample_tokens}: must be below --context {self.context}"
            )
        return self

    def is_save_due(self, step: int) -> bool:
        return self.save and (step == self.steps or step % self.save_every == 0)
