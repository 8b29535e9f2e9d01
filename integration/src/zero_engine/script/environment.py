"""The environment variables by which a process, and all that it starts, get the hook."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

ON_PATH = Path(__file__).parent / "on_path"


def hooked(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` with the hook's folders in front of PYTHONPATH and PATH."""
    return {
        **environment,
        "PYTHONPATH": _in_front(str(ON_PATH), environment.get("PYTHONPATH", "")),
        # Its one program tells those who start DeepSpeed's launcher what to do.
        "PATH": _in_front(str(ON_PATH / "bin"), environment.get("PATH", os.defpath)),
    }


def no_launcher() -> str:
    """Return the advice for those who want DeepSpeed's own launcher."""
    return (ON_PATH / "no_launcher.txt").read_text(encoding="utf-8")


def _in_front(folder: str, others: str) -> str:
    return os.pathsep.join([folder, *(o for o in others.split(os.pathsep) if o and o != folder)])
