"""DeepSpeed's JSON, read as DeepSpeed reads it, and taken apart for this engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Settings", "read"]

_CLIPPING = 1.0
_OTHERS = frozenset({"dataloader_drop_last", "vocabulary_size", "msamp"})


@dataclass(frozen=True)
class Settings:
    """A configuration, read.

    Attributes:
        core: what `zero_core.build` takes.
        raw: what was given; the same object, if it was a dict.
    """

    core: dict[str, Any]
    raw: dict[str, Any]


def read(config: Mapping[str, Any] | str | Path) -> Settings:
    """Read a configuration: a mapping, or the path of a JSON file."""
    raw = config if isinstance(config, dict) else json.loads(Path(str(config)).read_text())
    core = {"gradient_clipping": _CLIPPING, **_without_auto(raw)}
    if core.get("steps_per_print") == float("inf"):
        del core["steps_per_print"]
    return Settings({k: v for k, v in core.items() if k not in _OTHERS}, raw)


def _without_auto(block: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: _without_auto(v) if isinstance(v, Mapping) else v
        for k, v in block.items()
        if v != "auto"
    }
