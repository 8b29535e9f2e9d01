"""Sources of a DeepSpeed configuration: a dict, a file, a text, or base64 of one, in Hjson."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from zero_core.config import check_plain, read_config_text, shown
from zero_core.errors import ConfigError
from zero_engine.deepspeed.config.hjson import parse_hjson

Source = Mapping[str, Any] | str | PathLike[str]


def load(source: Source) -> dict[str, Any]:
    """Return the configuration as a dict: ``source`` itself if it is one.

    Raises:
        ConfigError: it cannot be read, is not an object in JSON or Hjson, is nested too deeply, or
            has a number that is not finite.
    """
    found = dict(source) if isinstance(source, Mapping) else parse_hjson(*_text_of(source))
    # accelerate writes Infinity there, for never
    check_plain({k: v for k, v in found.items() if k != "steps_per_print"})
    return source if isinstance(source, dict) else found


def _text_of(source: str | PathLike[str]) -> tuple[str, str]:
    """Return the text and a name for messages."""
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return source, "the configuration"
    path = Path(source)
    if os.path.isfile(path):  # False where base64 makes too long a name
        return read_config_text(path), str(path)
    if isinstance(source, str):
        try:
            return base64.urlsafe_b64decode(source).decode("utf-8"), "the base64 configuration"
        except (binascii.Error, UnicodeError, ValueError):
            pass  # then it was meant as a path
    raise ConfigError(
        f"the configuration {shown(str(source))} is neither a file that exists, nor JSON, nor "
        "base64 of JSON: pass a dict or the path of a JSON file"
    )
