"""The configuration of a run: what differs from the defaults, and what has no effect."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from zero_core.config import load_config
from zero_core.config.rules import find_unneeded
from zero_core.errors import ConfigError
from zero_core.record.records import RunRecord
from zero_engine.report.run import Run

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def differences(run: RunRecord) -> list[tuple[str, str]]:
    """Return path and value of each key whose value is not the default."""
    try:
        batch = {"train_micro_batch_size_per_gpu": run.config[_BATCH[1]]}
        default = load_config(batch, world_size=run.world_size).model_dump(mode="json")
    except ConfigError:
        default = {}
    return [
        (path, json.dumps(value))
        for path, value in _leaves("", run.config, default)
        if path not in _BATCH
    ]


def _leaves(path: str, value: Any, default: Any) -> Iterator[tuple[str, Any]]:
    if value == default:
        return
    if not isinstance(value, Mapping):
        yield path, value
        return
    inner = default if isinstance(default, Mapping) else {}
    for name, below in value.items():
        yield from _leaves(f"{path}.{name}" if path else name, below, inner.get(name))


def without_effect(run: Run) -> list[list[str]]:
    """Return path, value and reason of each key that was given and has no effect."""
    if run.given is None:
        return []
    return [
        [path, json.dumps(value, default=str), reason]
        for path, value, reason in find_unneeded(run.given, run.ranks[0].config)
    ]
