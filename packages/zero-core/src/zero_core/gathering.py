"""Parameters that hold their values whole for a while, and what one rank changes in them.

[Note: whole parameters]
What is kept whole for good, and what a forward, a backward or another ``gathered`` needs right now,
is whole where it lies. At stage 3 a few parameters are copied out of their gathered segments, one
segment at a time, and these are given back at once: what is held is the parameters alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from zero_core.edit import Edit, Whole
from zero_core.errors import RankMismatchError
from zero_core.flow import Flow
from zero_core.segment_values import SegmentValues
from zero_core.state import ShardedState
from zero_core.unit import Unit

__all__ = ["Gathering"]


class Gathering:
    """What is behind `zero_core.Engine.gathered` and ``publish``."""

    def __init__(self, flow: Flow, state: ShardedState, on_replaced: Callable[[], None]) -> None:
        """``on_replaced`` is called when values may have changed, on all ranks."""
        self._flow = flow
        self._state = state
        self._on_replaced = on_replaced
        self._places = {id(p): (v, i) for v in state.values for i, p in enumerate(v.params)}

    def publish(self) -> None:
        """Have the parameters whose values are kept whole hold the current ones."""
        for unit in self._flow.units:
            if all(values.is_kept for values in unit.values):
                self._flow.gather(unit)

    @contextmanager
    def all_params(self, modifier_rank: int | None) -> Iterator[nn.Module]:
        """Within, every parameter is whole, and a forward releases none."""
        flow = self._flow
        flow.release_all()
        before, flow.is_held = flow.is_held, True
        try:
            for unit in flow.units:
                flow.gather(unit)
            wholes = [
                Whole(v, i, p.data) for v in self._state.values for i, p in enumerate(v.params)
            ]
            with self._editing(wholes, modifier_rank):
                yield self._state.module
        finally:
            flow.is_held = before
            if not before:
                flow.release_all()

    @contextmanager
    def some_params(
        self, params: Iterable[nn.Parameter], modifier_rank: int | None
    ) -> Iterator[nn.Module]:
        """Within, ``params`` are whole.

        Raises:
            ValueError: one of them is not the engine's.
            RankMismatchError: they are to be changed, and other ranks gather others.
        """
        places = self._find(params)
        if modifier_rank is not None:
            self._check_same([place for _, wanted in places for place in wanted.values()])
        copies: list[Whole] = []
        try:
            wholes = [w for unit, wanted in places for w in self._gather(unit, wanted, copies)]
            with self._editing(wholes, modifier_rank):
                yield self._state.module
        finally:
            for whole in copies:
                whole.values.let_go(whole.position)

    @contextmanager
    def _editing(self, wholes: list[Whole], modifier_rank: int | None) -> Iterator[None]:
        if modifier_rank is not None and self._flow.is_running:
            raise RuntimeError(
                "gathered(modifier_rank=...) within a forward or backward: change parameters "
                "between steps"
            )
        edit = None
        if modifier_rank is not None:
            edit = Edit(self._state, modifier_rank, wholes)
            self._state.control.barrier()  # others may read this rank's slice until they are here
        try:
            yield
            if edit is not None:
                edit.publish()
                self._on_replaced()
        finally:
            for whole in wholes:
                whole.point()

    def _check_same(self, places: list[tuple[SegmentValues, int]]) -> None:
        """A rank that gathers something else would wait for what never comes."""
        control = self._state.control
        numbers = [values.segment.slots[position].param for values, position in places]
        described = torch.tensor([zlib.crc32(repr(numbers).encode())])
        if len(set(control.gather(described).tolist())) > 1:
            names = [self._state.layout.params[number].name for number in numbers]
            raise RankMismatchError(
                f"rank {control.rank}: gathered(modifier_rank=...) was entered with different "
                f"parameters (here {names[:4]}): gather the same on every rank"
            )

    def _find(
        self, params: Iterable[nn.Parameter]
    ) -> list[tuple[Unit, dict[int, tuple[SegmentValues, int]]]]:
        """The units that hold ``params``, and where in them these are, by their ``id``."""
        found: dict[int, dict[int, tuple[SegmentValues, int]]] = {}
        for param in params:
            place = self._places.get(id(param))
            if place is None:
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} is not this engine's: gather "
                    "those of engine.module"
                )
            found.setdefault(place[0].segment.unit, {})[id(param)] = place
        order = {key: n for n, key in enumerate(self._places)}
        return [
            (self._flow.units[unit], dict(sorted(found[unit].items(), key=lambda x: order[x[0]])))
            for unit in sorted(found)
        ]

    def _gather(
        self,
        unit: Unit,
        wanted: dict[int, tuple[SegmentValues, int]],
        copies: list[Whole],
    ) -> Iterator[Whole]:
        """Have the ``wanted`` parameters of ``unit`` whole; add to ``copies`` what was copied."""
        is_in_place = self._flow.is_needed(unit) or all(v.is_kept for v, _ in wanted.values())
        if is_in_place:
            self._flow.gather(unit)
            yield from (Whole(v, i, v.params[i].data) for v, i in wanted.values())
            return
        held = [Whole(v, i, v.held[i]) for v, i in wanted.values() if i in v.held]
        for whole in held:  # by another context, which may end before this one
            whole.values.hold(whole.position, whole.tensor)
            copies.append(whole)
            yield whole
        missing = [(v, i) for v, i in wanted.values() if i not in v.held]
        if missing:
            self._flow.release(unit)
            self._flow.gather(unit)
            with torch.inference_mode(False):  # they may serve an initialization
                new = [Whole(v, i, v.params[i].data.clone()) for v, i in missing]
            self._flow.release(unit)
            for whole in new:
                whole.values.hold(whole.position, whole.tensor)
                copies.append(whole)
                yield whole
