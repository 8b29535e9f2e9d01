"""Which engine a parameter belongs to, for code that is handed parameters alone."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from zero_core.layout import Layout
from zero_core.segment_values import SegmentValues

if TYPE_CHECKING:
    from zero_core.engine import Engine

__all__ = ["engine_of", "names_by_id", "register"]

_engines: list[weakref.ref[Engine]] = []  # those alive, the newest last


def register(engine: Engine) -> None:
    """``engine`` is to be found by `engine_of` as long as it lives and is not closed."""
    _engines[:] = [ref for ref in _engines if ref() is not None]
    _engines.append(weakref.ref(engine))


def engine_of(param: nn.Parameter) -> Engine | None:
    """The engine that ``param`` belongs to, the newest if there are several; else None."""
    alive = (ref() for ref in reversed(_engines))
    return next((e for e in alive if e is not None and e.owns(param) is not None), None)


def names_by_id(layout: Layout, values: Sequence[SegmentValues]) -> dict[int, str]:
    """The first name of each parameter, by its ``id``; who keeps it must keep ``values`` too."""
    return {
        id(param): layout.params[slot.param].name
        for v in values
        for slot, param in zip(v.segment.slots, v.params, strict=True)
    }
