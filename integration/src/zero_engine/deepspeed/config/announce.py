"""Log levels of a configuration, and its description, which rank 0 prints once."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from zero_core.config import Config, find_unneeded
from zero_engine.deepspeed.config.reader import PATHS, Settings
from zero_engine.deepspeed.utils.logging import speak

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_NO_KEYS = ("raw", "core", "notes", "steps_per_print")
"""Fields of `Settings` that are no keys, or are described with zero-core's configuration."""
_DEFAULTS = Settings(raw={}, core={})
_LOGGERS = ("DeepSpeed", "zero_core", "zero_comm", "zero_engine", "zero_offload")


def apply(settings: Settings) -> None:
    """Apply the process's settings: log levels, Python's garbage collector, NVMe folders."""
    if settings.steps_per_print is not None:
        speak("zero_core.optim.train_state", logging.INFO)
    if settings.log_level is not None:
        for name in _LOGGERS:
            speak(name, settings.log_level.upper())
    if settings.disable_python_gc:
        gc.collect()
        gc.disable()
    zero = settings.core.get("zero_optimization", {})
    for block in (zero.get("offload_optimizer", {}), zero.get("offload_param", {})):
        is_file = isinstance(block, Mapping) and block.get("device") == "nvme"
        if is_file and isinstance(block.get("nvme_path"), str):
            Path(block["nvme_path"]).mkdir(parents=True, exist_ok=True)  # DeepSpeed makes it too


def describe(settings: Settings, config: Config, world_size: int) -> str:
    """Describe the batch, values that differ from the defaults, keys without effect, and notes.

    ``config`` is zero-core's configuration of ``settings``.
    """
    total, micro, steps = (getattr(config, key) for key in _BATCH)
    # The fields of `Settings` that hold keys, by path in a configuration.
    own = {PATHS.get(f.name, f.name): f.name for f in fields(Settings) if f.name not in _NO_KEYS}
    unneeded = list(find_unneeded(settings.core, config))
    skipped = {*_BATCH, *own, *(path for path, _, _ in unneeded)}
    different = [row for row in _leaves("", config, None) if row[0] not in skipped]
    for path, name in own.items():
        leaves = _leaves(path, getattr(settings, name), getattr(_DEFAULTS, name))
        different += [row for row in leaves if not row[0].endswith("api_key")]
    lines = [
        "zero-engine: configuration in effect; every other key has its default",
        f"  batch: {total} samples a step = {micro} a rank and micro-step * {steps} micro-steps "
        f"* {world_size} ranks",
        *(f"  {path} = {json.dumps(value)}" for path, value in different),
    ]
    without_effect = [*settings.notes, *(row for row in unneeded if row[0] not in own)]
    if without_effect:
        lines.append("  keys without effect, or with another name:")
    for path, value, text in without_effect:
        shown = json.dumps(value, default=str)
        lines.append(f"    {path} = {shown if len(shown) <= 60 else f'{shown[:57]}...'}: {text}")
    if settings.dump_state:
        lines += ["  all of it:", config.model_dump_json(indent=2)]
    return "\n".join(lines)


def _leaves(path: str, value: Any, default: Any) -> Iterator[tuple[str, object]]:
    """Yield path and value of each leaf below ``path`` that differs from its default."""
    if value == default:
        return
    if not isinstance(value, BaseModel):
        yield path, value
        return
    for name, field in type(value).model_fields.items():
        below = f"{path}.{name}" if path else name
        its_default = field.get_default(call_default_factory=True)
        yield from _leaves(below, getattr(value, name), its_default)
