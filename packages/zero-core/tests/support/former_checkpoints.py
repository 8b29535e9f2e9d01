"""Checkpoints as tests need them: changed, and as version 1 of the format had them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zero_core.checkpoint.manifest import MANIFEST, seal


def rewrite(place: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Have ``change`` edit a manifest of version 2, and put the right digest under it."""
    path = place / MANIFEST
    content = json.loads(path.read_bytes())
    change(content)
    path.write_bytes(seal(content))


def make_version_1(place: Path) -> dict[str, Any]:
    """Turn a checkpoint into one of version 1, and return its manifest."""
    path = place / MANIFEST
    content: dict[str, Any] = json.loads(path.read_bytes())
    del content["sha256"], content["chunk_bytes"]
    content["version"] = 1
    for param in content["params"]:
        param.pop("memory_order", None)
    for name, facts in content["files"].items():
        facts["crc32"] = zlib.crc32(place.joinpath(name).read_bytes())
    path.write_text(json.dumps(content))
    return content
