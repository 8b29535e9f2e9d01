"""Settings of a run, kept in ``config.resolved.json``, and the paths of its results."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from zero_core.checkpoint import (
    Location,
    holds_checkpoint,
    list_checkpoints,
    local_path,
    location_of,
)
from zero_core.config import parse_json, read_config_text
from zero_core.errors import CheckpointError, ConfigError
from zero_engine.presets import default_config_text
from zero_engine.train.options import RESOLVED_CONFIG, RunSettings, Start, flag_of

AUTO = "auto"
RECORDS = "records"
CHANGEABLE = (
    *("output", "steps", "save", "save_every", "keep_last"),
    *("log_every", "sample_tokens", "export"),
)
"""Settings that may change when a run is resumed."""


class RunFolder:
    """Paths of one run's results.

    ``records`` is read by ``zero-engine report``, ``hf`` by transformers' ``from_pretrained``.
    ``metrics`` has the values of TensorBoard's log, and ``resolved_config`` all settings with
    defaults. ``checkpoint`` may be elsewhere, or a URL.
    """

    def __init__(self, root: Path, checkpoints: str | None = None) -> None:
        self.root = root
        self.resolved_config = root / RESOLVED_CONFIG
        self.data = root / "data"
        self.metrics = root / "metrics.jsonl"
        self.records = root / RECORDS
        self.tensorboard = root / "tensorboard"
        self.checkpoint = root / "checkpoint" if checkpoints is None else _location(checkpoints)
        self.hf = root / "hf"
        self.loss_plot = root / "loss.png"
        self.memory_plot = root / "memory.png"
        self.sample = root / "sample.txt"
        self.lock = root / ".lock"
        self.launchers = root / ".launchers.json"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> RunFolder:
        output, checkpoints = options.get("output") or RunSettings().output, None
        try:
            folder = cls(local_path(output, "a run"))
        except CheckpointError as error:
            raise ConfigError(f"--output: {error}; give one for --checkpoints") from None
        if folder.resolved_config.is_file():
            with suppress(ConfigError):  # another program's file is refused later
                checkpoints = read_resolved(folder)["run"].get("checkpoints")
        return cls(folder.root, options.get("checkpoints") or checkpoints)

    @property
    def has_checkpoint(self) -> bool:
        place = self.checkpoint  # after a kill in the first save it lacks ``latest``
        return holds_checkpoint(place) or (place.is_dir() and bool(list_checkpoints(place)))

    @property
    def has_run(self) -> bool:
        return self.resolved_config.is_file()


def fresh_run(options: Mapping[str, Any], start: Start) -> RunSettings:
    """Return the settings of a new run: ``options`` that are not None, over the defaults.

    With `Start.AUTO` and an empty output folder, ``checkpoints`` may hold checkpoints already.
    """
    given = {k: _canonical(k, v) for k, v in options.items() if v is not None}
    _check_saving(given)
    settings = RunSettings.of(given)
    folder = RunFolder.of(given)
    try:
        places = (folder.root, *folder.root.absolute().parents)
        there = next(place for place in places if place.exists())
    except (OSError, ValueError) as error:  # the name is too long or has a zero character
        raise ConfigError(f"--output {str(folder.root)!r}: {error}") from None
    if not there.is_dir():
        raise ConfigError(f"--output {folder.root}: there is a file of the name {there}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"--output {folder.root}: {there} is not writable for this user")
    is_free = not folder.root.is_dir() or not any(
        path for path in folder.root.iterdir() if not path.name.startswith(".")
    )
    is_elsewhere = settings.checkpoints is not None
    has_ended = folder.loss_plot.is_file()  # complete or stopped: a run draws its losses last
    is_kept = (not is_free or is_elsewhere) and (folder.has_checkpoint or has_ended)
    may_begin = not is_kept or start is Start.OVERWRITE or (is_free and start is Start.AUTO)
    if (is_free or folder.has_run) and may_begin:
        return settings
    if not is_free and not folder.has_run:
        raise ConfigError(
            f"--output {folder.root}: the folder is not empty and holds no run; choose another"
        )
    place = f"--checkpoints {folder.checkpoint}" if is_elsewhere else f"--output {folder.root}"
    raise ConfigError(
        f"{place} holds a run already: continue it with --resume, replace it "
        "with --overwrite, or choose another folder (--resume auto continues a run or starts one)"
    )


def _check_saving(given: Mapping[str, Any]) -> None:
    for name in ("save_every", "keep_last", "checkpoints"):
        if given.get("save") is False and name in given:
            raise ConfigError(f"--no-save and {flag_of(name)} exclude each other")


def resumed_run(options: Mapping[str, Any]) -> RunSettings:
    given = {k: v for k, v in options.items() if v is not None}
    _check_saving(given)
    folder = RunFolder.of(given)
    if not folder.has_checkpoint:
        raise ConfigError(
            f"--resume: {folder.checkpoint} has no checkpoint to continue from; "
            "start the run without --resume"
        )
    saved = RunSettings.of(read_resolved(folder)["run"])
    for name, value in given.items():
        if name not in CHANGEABLE and _canonical(name, value) != getattr(saved, name):
            raise ConfigError(
                f"--resume: {flag_of(name)} {value} contradicts the run, which has "
                f"{getattr(saved, name)}; leave the option out, or start a new run"
            )
    changed = {name: given[name] for name in CHANGEABLE if name in given}
    return RunSettings.of({**saved.model_dump(), **changed, "output": str(folder.root)})


def engine_config(path: str | None, *, is_accelerated: bool) -> dict[str, Any]:
    """Return the configuration at ``path``. bf16 is on if "auto" and ``is_accelerated``."""
    text = default_config_text() if path is None else read_config_text(Path(path), "--config")
    found = parse_json(text, f"--config {path}")
    is_auto = found.get("bf16") == {"enabled": AUTO}
    return found | ({"bf16": {"enabled": is_accelerated}} if is_auto else {})


def fill_auto(config: dict[str, Any], steps: int) -> dict[str, Any]:
    scheduler = config.get("scheduler")
    params = scheduler.get("params") if isinstance(scheduler, dict) else None
    if not isinstance(scheduler, dict) or not isinstance(params, dict):
        return config
    values = {"total_num_steps": steps, "warmup_num_steps": max(1, steps // 5)}
    filled = {k: values.get(k, v) if v == AUTO else v for k, v in params.items()}
    return {**config, "scheduler": {**scheduler, "params": filled}}


def write_resolved(folder: RunFolder, settings: RunSettings, **parts: Any) -> None:
    text = json.dumps({"run": settings.model_dump(), **parts}, indent=2) + "\n"
    aside = folder.resolved_config.with_name(".config.resolved.tmp")
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, folder.resolved_config)
    except OSError as error:
        raise ConfigError(f"--output {folder.root}: cannot be written: {error.strerror}") from None


def read_resolved(folder: RunFolder) -> dict[str, Any]:
    try:
        content = json.loads(folder.resolved_config.read_text(encoding="utf-8"))
        # Null means a default. Later versions may lack a setting that is null here.
        content["run"] = {k: v for k, v in content["run"].items() if v is not None}
        RunSettings(**content["run"])
        return dict(content)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # all errors give the same message
    raise ConfigError(f"{folder.resolved_config} is missing or was not written by this version")


def _canonical(name: str, value: Any) -> Any:
    if name == "checkpoints":
        place = _location(value)
        return str(place.resolve() if isinstance(place, Path) else place)
    return str(Path(value).resolve()) if name in ("data", "config") else value


def _location(checkpoints: str) -> Location:
    try:
        return location_of(checkpoints)
    except CheckpointError as error:
        raise ConfigError(f"--checkpoints {error}") from None
