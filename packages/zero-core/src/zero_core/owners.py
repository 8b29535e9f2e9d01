"""Which engine a parameter belongs to, for code that is handed parameters or modules alone."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from zero_core.flow import Flow
from zero_core.layout import Layout
from zero_core.segment_values import SegmentValues

if TYPE_CHECKING:
    from zero_core.engine import Engine

__all__ = ["engine_of", "names_by_id", "refuse_stale_state_dicts", "register"]

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


def refuse_stale_state_dicts(module: nn.Module, flow: Flow) -> list[Any]:
    """Have ``state_dict`` raise where parameters do not hold the current values; the hooks."""

    def refuse(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if flow.has_stale_values:
            raise RuntimeError(
                "the module's parameters do not hold the current values here: use "
                "engine.full_state_dict(), or state_dict() within engine.gathered()"
            )

    return [m.register_state_dict_pre_hook(refuse) for m in module.modules()]  # type: ignore[no-untyped-call]
