from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zero_core.checkpoint.manifest import MANIFEST, seal


def rewrite(place: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply ``change`` to the manifest of the checkpoint at ``place`` and recompute its digest."""
    path = place / MANIFEST
    content = json.loads(path.read_bytes())
    change(content)
    path.write_bytes(seal(content))
