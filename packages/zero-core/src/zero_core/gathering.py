"""Parameters that hold their values whole for a while, and what one rank changes in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zero_core.edit import Edit
from zero_core.flow import Flow
from zero_core.state import ShardedState

__all__ = ["gathered"]


@contextmanager
def gathered(
    flow: Flow, state: ShardedState, modifier_rank: int | None, on_replaced: Callable[[], None]
) -> Iterator[None]:
    """See `zero_core.Engine.gathered`; ``on_replaced`` is called if values may have changed."""
    flow.release_all()
    before, flow.is_held = flow.is_held, True
    try:
        flow.gather_all()
        edit = None if modifier_rank is None else Edit(state, modifier_rank)
        yield
        if edit is not None:
            edit.publish()
            on_replaced()
    finally:
        flow.is_held = before
        if not before:
            flow.release_all()
