"""Parameters that hold their values whole for a while, and what one rank changes in them.

[Note: whole parameters]
What is kept whole for good, and what a forward, a backward or another ``gathered`` needs right now,
is whole where it lies. At stage 3 a few parameters are copied out of their gathered segments, one
unit at a time, and these are given back at once: what is held is the parameters alone. While a
context of the whole model is open nothing is released; one of a few parameters that was entered
within it, and so copied none, keeps it all whole to its own end.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

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
        self._num_open = 0
        self._places = {id(p): (v, i) for v in state.values for i, p in enumerate(v.params)}

    @property
    def is_open(self) -> bool:
        """Whether parameters are held whole now."""
        return self._num_open > 0

    def publish(self) -> None:
        """Have the parameters whose values are kept whole hold the current ones."""
        for unit in self._flow.units:
            if all(values.is_kept for values in unit.values):
                self._flow.gather(unit)

    @contextmanager
    def all_params(self, modifier_rank: int | None) -> Iterator[nn.Module]:
        """Within, every parameter is whole, and a forward releases none."""
        if modifier_rank is not None:
            self._check_same(modifier_rank, [])
        self._flow.release_all()
        with self._nothing_released():
            for unit in self._flow.units:
                self._flow.gather(unit)
            wholes = [
                Whole(v, i, p.data) for v in self._state.values for i, p in enumerate(v.params)
            ]
            with self._editing(wholes, modifier_rank):
                yield self._state.module

    @contextmanager
    def _nothing_released(self) -> Iterator[None]:
        """Within, what is gathered stays; contexts may end in any order."""
        self._flow.num_wholes += 1
        try:
            yield
        finally:
            self._flow.num_wholes -= 1
            if not self._flow.num_wholes:
                self._flow.release_all()

    @contextmanager
    def some_params(
        self, params: Iterable[nn.Parameter], modifier_rank: int | None
    ) -> Iterator[nn.Module]:
        """Within, ``params`` are whole.

        Raises:
            ValueError: one of them is not the engine's.
            RankMismatchError: they are to be changed, and other ranks gather others.
        """
        wanted = list(params)
        if modifier_rank is not None:
            self._check_same(modifier_rank, wanted)
        places = self._find(wanted)
        copies: list[Whole] = []
        with self._nothing_released() if self._flow.num_wholes else nullcontext():
            try:
                wholes = [w for unit, own in places for w in self._gather(unit, own, copies)]
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
        self._num_open += 1
        try:
            yield
            if edit is not None:
                edit.publish()
                self._on_replaced()
        finally:
            self._num_open -= 1
            for whole in wholes:
                whole.values.point(whole.position)

    def _check_same(self, modifier_rank: int, params: Sequence[nn.Parameter]) -> None:
        """A rank that asks for something else would wait for what never comes."""
        control = self._state.control
        names = sorted({self._name(param) for param in params})
        described = torch.tensor([zlib.crc32(repr((modifier_rank, names)).encode())])
        if len(set(control.gather(described).tolist())) > 1:
            raise RankMismatchError(
                f"rank {control.rank}: gathered() was entered with different parameters (here "
                f"{names[:4] or 'all'}) or another modifier_rank (here {modifier_rank}): give the "
                "same on every rank"
            )

    def _name(self, param: nn.Parameter) -> str:
        """The first name of ``param``, or that it has none here: `_find` refuses it."""
        place = self._places.get(id(param))
        if place is None:
            return "one that is not this engine's"
        values, position = place
        return self._state.layout.params[values.segment.slots[position].param].name

    def _find(
        self, params: Sequence[nn.Parameter]
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
        """Have the ``wanted`` parameters of ``unit`` whole; add to ``copies`` what was copied.

        A unit that rests off the device may have segments that are kept: these are not copied.
        """
        is_needed = self._flow.is_needed(unit)
        copied = {key for key, (v, _) in wanted.items() if not (is_needed or v.is_kept)}
        # What another context holds, which may end before this one, is held once more.
        missing = [key for key in copied if wanted[key][1] not in wanted[key][0].held]
        new: dict[int, Tensor] = {}
        if missing or len(copied) < len(wanted):
            if not is_needed:
                self._flow.release(unit)
            self._flow.gather(unit)
            with torch.inference_mode(False):  # they may serve an initialization
                new = {k: wanted[k][0].params[wanted[k][1]].data.clone() for k in missing}
            if not is_needed:
                self._flow.release(unit)
        for key, (values, position) in wanted.items():
            if key not in copied:
                yield Whole(values, position, values.params[position].data)
                continue
            whole = Whole(values, position, new[key] if key in new else values.held[position])
            values.hold(position, whole.tensor)
            copies.append(whole)
            yield whole
