"""Find the installed parts that a configuration asks for, and only those."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from zero_core.errors import MissingPartError

__all__ = ["COLLECTIVES", "KERNELS", "PARAM_TIERS", "TIERS", "has_part", "load_part"]

COLLECTIVES = "zero_core.collectives"
TIERS = "zero_core.state_tiers"
PARAM_TIERS = "zero_core.param_tiers"
KERNELS = "zero_core.adam_kernels"


def has_part(group: str, name: str) -> bool:
    """Whether a part of that name is installed."""
    return bool(entry_points(group=group, name=name))


def load_part(group: str, name: str, *, asked_by: str, distribution: str) -> Any:
    """The object behind entry point ``name`` of ``group``.

    Args:
        group: entry-point group.
        name: entry point.
        asked_by: the configuration key that asks for it, for the message.
        distribution: the package that provides it, for the message.

    Raises:
        MissingPartError: it is not installed, or does not import.
    """
    found = list(entry_points(group=group, name=name))
    if not found:
        raise MissingPartError(
            f"{asked_by} needs the package {distribution}, which is not installed: "
            f"pip install {distribution}"
        )
    try:
        return found[0].load()
    except ImportError as error:
        raise MissingPartError(
            f"{asked_by} needs the package {distribution}, which is installed but does not "
            f"import: {error}; try: pip install --force-reinstall {distribution}"
        ) from error
