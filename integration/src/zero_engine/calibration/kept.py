"""Measured speeds ("rates") that ``zero-engine doctor --measure`` saves for this user and machine.

The file is ``$XDG_CACHE_HOME/zero-engine/rates.json`` (default ``~/.cache``). It holds a
`Calibration` and, under "machine", the `fingerprint` of the machine that was measured.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from zero_core.config import parse_json, read_config_text
from zero_core.errors import ConfigError
from zero_engine.machine import accelerator_names, available_cores, processor_name
from zero_engine.planning import Calibration

MEASURE = "measure this machine with zero-engine doctor --measure"


@dataclass(frozen=True)
class KeptRates:
    """Saved rates (None if missing, or of another machine or torch), and a line for the user."""

    calibration: Calibration | None
    said: str


def kept_path() -> Path:
    return Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "zero-engine/rates.json"
    )


def fingerprint() -> dict[str, object]:
    return {
        "processor": processor_name(),
        "cores": available_cores(),
        "accelerators": accelerator_names(),
        "torch": torch.__version__,
    }


def keep(found: Calibration, written_to: str) -> Path:
    path = kept_path()
    content = {**json.loads(found.to_json()), "machine": fingerprint()}
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(content) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise ConfigError(
            f"the rates are in {written_to}, but cannot be kept in {path}: {error.strerror}; give "
            f"--rates {written_to} to zero-engine plan, or set XDG_CACHE_HOME to a folder of yours"
        ) from None
    return path


def kept_rates() -> KeptRates:
    """Read the saved rates, which are used only if their machine's `fingerprint` is the same."""
    path = kept_path()
    if not path.exists():
        return KeptRates(None, f"no times: no rates are kept in {path}: {MEASURE}")
    name = f"the kept rates {path}"
    content = parse_json(read_config_text(path, name), name)
    was, now = content.get("machine"), fingerprint()
    if not isinstance(was, dict):
        raise ConfigError(f"{name} say nothing about their machine: {MEASURE}")
    differing = [key for key in now if was.get(key) != now[key]]
    if not differing:
        found = Calibration.from_json(content, name)
        return KeptRates(found, f"times by the rates kept in {path}, {found.source}")
    which = "another torch" if differing == ["torch"] else "another machine"
    changed = ", ".join(f"{key} {was.get(key)}, here {now[key]}" for key in differing)
    return KeptRates(
        None, f"no times: the rates kept in {path} are of {which} ({changed}): {MEASURE}"
    )
