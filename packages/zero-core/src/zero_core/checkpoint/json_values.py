"""JSON form of client and scheduler state, restored exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from zero_core.errors import CheckpointError


def encode(value: Any) -> Any:
    """Return ``value`` as JSON from which `decode` restores it exactly.

    Raises:
        CheckpointError: it holds anything but numbers, strings, lists, tuples and mappings.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(v) for v in value]
    if isinstance(value, tuple):
        return {"__tuple__": [encode(v) for v in value]}
    if isinstance(value, Mapping):
        items = [[encode(k), encode(v)] for k, v in value.items()]
        if isinstance(value, Counter):  # MultiStepLR keeps its milestones in one
            return {"__counter__": items}
        if all(isinstance(k, str) and not k.startswith("__") for k in value):
            return dict(items)
        return {"__items__": items}
    raise CheckpointError(
        "client and scheduler state must be JSON (numbers, strings, lists, mappings), found "
        f"{type(value).__name__}: {value!r:.60}"
    )


def decode(value: Any) -> Any:
    """Restore the argument of `encode`."""
    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__tuple__"}:
        return tuple(decode(v) for v in value["__tuple__"])
    if value.keys() == {"__counter__"}:
        return Counter({decode(k): decode(v) for k, v in value["__counter__"]})
    if value.keys() == {"__items__"}:
        return {decode(k): decode(v) for k, v in value["__items__"]}
    return {k: decode(v) for k, v in value.items()}
