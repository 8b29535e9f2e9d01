"""The forms of ``zero=...``: a preset's name, a mapping, a file."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_core import ConfigError
from zero_engine.deepspeed.config.source import load
from zero_engine.presets import PRESETS


def read_zero(zero: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of ``zero``: a preset's name, a JSON file's path, or itself.

    "auto" values are still in it.

    Raises:
        ConfigError: no such preset or file, or the file is not a JSON object.
    """
    if isinstance(zero, Mapping):
        return copy.deepcopy(dict(zero))
    if isinstance(zero, str) and zero in PRESETS:
        return {"zero_optimization": copy.deepcopy(dict(PRESETS[zero]))}
    if Path(zero).suffix == ".json" or Path(zero).is_file():
        return copy.deepcopy(load(zero))
    near = difflib.get_close_matches(str(zero), PRESETS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"zero = {str(zero)!r} is neither a preset nor a file: {hint}"
        f"Presets: {', '.join(PRESETS)}; or give a configuration, or the path of its JSON file"
    )
