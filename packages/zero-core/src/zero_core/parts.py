"""Optional parts in other packages, found by entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from zero_core.errors import MissingPartError

FOUND: dict[tuple[str, str], EntryPoint] = {}
"""Entry points that `load_part` has found, because a search reads all packages' metadata."""
_FOLDERS = {p: f"packages/{p}" for p in ("cpu-adam", "zero-comm", "zero-core", "zero-offload")}
_FOLDERS["zero-parts"] = " ".join((*_FOLDERS.values(), "./integration"))
"""This project's packages, which no index has, and what pip installs them from in a clone."""


def missing_part(asked_by: str, distribution: str) -> MissingPartError:
    return MissingPartError(
        f"{asked_by} needs the package {distribution}, which is not installed: "
        f"{install_command(distribution)}"
    )


def install_command(distribution: str, *flags: str) -> str:
    """Return the pip command that installs ``distribution``."""
    place = " (in a clone of the repository)" if distribution in _FOLDERS else ""
    return " ".join(("pip install", *flags, _FOLDERS.get(distribution, distribution))) + place


def has_part(group: str, name: str) -> bool:
    return bool(entry_points(group=group, name=name))


def load_part(group: str, name: str, *, asked_by: str, distribution: str) -> Any:
    """Load entry point ``name`` of ``group``, which ``distribution`` provides for ``asked_by``."""
    if (group, name) not in FOUND:
        found = list(entry_points(group=group, name=name))
        if not found:
            raise missing_part(asked_by, distribution)
        FOUND[group, name] = found[0]
    try:
        return FOUND[group, name].load()
    except ImportError as error:
        raise MissingPartError(
            f"{asked_by} needs the package {distribution}, which is installed but does not "
            f"import: {error}; try: {install_command(distribution, '--force-reinstall')}"
        ) from error
