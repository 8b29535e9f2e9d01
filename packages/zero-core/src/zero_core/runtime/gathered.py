"""Parameters that hold their full values for a while, and one rank's changes to them.

[Note: full parameters]
What is kept for good, and what a forward, a backward or another ``gathered`` needs right now, is
full where it is. At stage 3 a few parameters are copied out of their gathered segments, one unit at
a time, and the unit is released at once: the context takes the memory of the parameters alone.
While a context of the whole model is open nothing is released; one of a few parameters that was
entered within it, and so copied none, keeps it all gathered to its own end.

[Note: edits]
One rank's changes reach all shards and master weights. Of master weights only the elements that
were changed are overwritten: one that was not touched keeps the bits that its rounded copy lacks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zero_core.core.params import FlatParams
from zero_core.core.passes import Passes
from zero_core.core.unit import Unit
from zero_core.errors import RankMismatchError
from zero_core.layout.arithmetic import ParamSpec, Slot
from zero_core.sharded.edits import Edits
from zero_core.sharded.sharded_state import ShardedState

_SAME, _CHANGED, _RESHAPED = 0.0, 1.0, 2.0


class _FullParam(NamedTuple):
    """One parameter while it is gathered: that at ``position`` of ``flat``."""

    flat: FlatParams
    position: int
    tensor: Tensor  # the values, in the parameter's shape, which it is a view of

    @property
    def param(self) -> Tensor:
        return self.flat.params[self.position]

    @property
    def slot(self) -> Slot:
        return self.flat.segment.slots[self.position]


class GatheredParams:
    """Implementation of `zero_core.Engine.gathered` and ``publish``."""

    def __init__(self, passes: Passes, state: ShardedState, edits: Edits) -> None:
        self._passes = passes
        self._units = passes.units
        self._state = state
        self._edits = edits
        # Of each open context, versions of what it only reads, by id of the parameter.
        self._reading: list[dict[int, int]] = []
        self._edited: set[int] = set()  # ids of parameters that a context may change

    @property
    def is_open(self) -> bool:
        return bool(self._reading)

    def version_of(self, param: nn.Parameter) -> int | None:
        """Return the version of the values of ``param``, None if it is not sharded here."""
        place = self._state.places.get(id(param))
        return None if place is None or place[0].is_kept else place[0].version

    def publish(self) -> None:
        """Make the parameters whose values are kept hold the current ones."""
        for unit in self._units.units:
            if all(flat.is_kept for flat in unit.params):
                self._units.gather_exact(unit)

    @contextmanager
    def all_params(self, modifier_rank: int | None) -> Iterator[nn.Module]:
        """Gather every parameter within. A forward releases none."""
        self._passes.forward.end_interrupted()
        if modifier_rank is not None:
            self._check_same(modifier_rank, [])
        self._units.release_all()
        with self._units.full_params():
            for unit in self._units.units:
                self._units.gather_exact(unit)
            full = [_FullParam(f, i, f.params[i].data) for f, i in self._state.places.values()]
            with self._open(full, modifier_rank):
                yield self._state.module

    @contextmanager
    def some_params(
        self, params: Iterable[nn.Parameter], modifier_rank: int | None
    ) -> Iterator[nn.Module]:
        """Gather ``params`` within."""
        self._passes.forward.end_interrupted()
        wanted = list(params)
        if modifier_rank is not None:
            self._check_same(modifier_rank, wanted)
        places = self._find(wanted)
        copies: list[_FullParam] = []
        with self._units.full_params() if self._units.has_full_params else nullcontext():
            try:
                full = [p for unit, own in places for p in self._gather(unit, own, copies)]
                with self._open(full, modifier_rank):
                    yield self._state.module
            finally:
                for copied in copies:
                    copied.flat.shown.drop(copied.position)

    @contextmanager
    def _open(self, full: list[_FullParam], modifier_rank: int | None) -> Iterator[None]:
        if modifier_rank is not None and self._passes.is_running:
            raise RuntimeError(
                "gathered(modifier_rank=...) within a forward or backward: change parameters "
                "between steps"
            )
        edit = None
        if modifier_rank is not None:
            edit = _Edit(self._state, self._edits, modifier_rank, full)
            self._state.control.barrier()  # others may read this rank's slice until they are here
            self._edited.update(id(p.param) for p in full)
        # What is changed in these is lost, unless a context around this one takes it over.
        lost = [p for p in full if not (p.flat.is_kept or id(p.param) in self._edited)]
        before = {id(p.param): p.param._version for p in lost}
        self._reading.append(before)
        try:
            with self._watching(lost):
                yield
            if edit is not None:
                edit.publish()
                self._edits.forget(self._state.layout.params[p.slot.param].name for p in full)
                self._units.values_replaced()
                known = {id(p.param): p.param._version for p in full}
                for read in self._reading:
                    read.update((key, known[key]) for key in read.keys() & known.keys())
            else:
                for p in full:  # what replaced the memory of kept parameters is copied into it
                    if p.flat.is_kept and p.param.data_ptr() != p.tensor.data_ptr():
                        with torch.no_grad():
                            p.tensor.copy_(p.param.data)
                self._check_unwritten(lost, before)
        finally:
            self._reading = [read for read in self._reading if read is not before]
            if edit is not None:
                self._edited.difference_update(id(p.param) for p in full)
            for param in full:
                param.flat.shown.restore(param.position)

    def _watching(self, full: Sequence[_FullParam]) -> AbstractContextManager[None]:
        """Have a graph that is made within, outside of a forward, outlive the values."""
        params = [p.param for p in full if isinstance(p.param, nn.Parameter)]
        if not params or self._passes.is_running or not torch.is_grad_enabled():
            return nullcontext()
        return self._units.saved.watching_gathered(params, self, self._passes.backward)

    def _check_unwritten(self, full: Sequence[_FullParam], versions: Mapping[int, int]) -> None:
        """Refuse changes within a context that only reads, of which nothing would be left."""
        specs, cures = self._state.layout.params, self._state.cures
        changed = [
            specs[p.slot.param].name
            for p in full
            if p.param._version != versions[id(p.param)]
            or p.flat.shown.restore(p.position)
            or not _has_own_slice(p, specs[p.slot.param])
        ]
        if changed:
            more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
            raise RuntimeError(
                f"rank {self._state.control.rank}: {', '.join(changed[:4])}{more} changed within "
                f"{cures.read}, which only reads: at stage 3 the new values would be lost. Change "
                f"them within {cures.write}, which brings one rank's values to all"
            )

    def _check_same(self, modifier_rank: int, params: Sequence[nn.Parameter]) -> None:
        """Refuse ranks that gather something else: they would wait for each other."""
        control = self._state.control
        known = self._state.param_names
        names = sorted({known.get(id(p), "one that is not this engine's") for p in params})
        described = torch.tensor([zlib.crc32(repr((modifier_rank, names)).encode())])
        if len(set(control.gather(described).tolist())) > 1:
            raise RankMismatchError(
                f"rank {control.rank}: gathered() was entered with different parameters (here "
                f"{names[:4] or 'all'}) or another modifier_rank (here {modifier_rank}): give the "
                "same on every rank"
            )

    def _find(
        self, params: Sequence[nn.Parameter]
    ) -> list[tuple[Unit, list[tuple[FlatParams, int]]]]:
        """Return the units that hold ``params``, each with their places in it, in order."""
        places = self._state.places_of
        for param in params:
            if id(param) not in places:
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} is not this engine's: gather "
                    "those of engine.module"
                )
        wanted = {place for param in params for place in places[id(param)]}
        found: dict[int, list[tuple[FlatParams, int]]] = {}
        for place in self._state.places.values():
            if place in wanted:
                found.setdefault(place[0].segment.unit, []).append(place)
        return [(self._units.units[unit], found[unit]) for unit in sorted(found)]

    def _gather(
        self, unit: Unit, wanted: list[tuple[FlatParams, int]], copies: list[_FullParam]
    ) -> Iterator[_FullParam]:
        """Gather the ``wanted`` parameters of ``unit``. Add those not kept to ``copies``."""
        is_needed = self._passes.is_needed(unit)
        copied = [not (is_needed or flat.is_kept) for flat, _ in wanted]
        # A copy of another context is held once more: that one may end before this one.
        missing = [
            is_copied and flat.shown.copy_of(position) is None
            for (flat, position), is_copied in zip(wanted, copied, strict=True)
        ]
        new: list[Tensor | None] = [None] * len(wanted)
        if any(missing) or not all(copied):
            if not is_needed:
                self._units.release(unit)
            self._units.gather_exact(unit)
            with torch.inference_mode(False):  # they may serve an initialization
                for n, (flat, position) in enumerate(wanted):
                    if missing[n]:
                        new[n] = flat.params[position].data.clone()
            if not is_needed:
                self._units.release(unit)
        for (flat, position), is_copied, copy in zip(wanted, copied, new, strict=True):
            if not is_copied:
                yield _FullParam(flat, position, flat.params[position].data)
                continue
            found = _FullParam(flat, position, flat.shown.hold(position, copy))
            copies.append(found)
            yield found


class _Edit:
    """Changes by rank ``rank``, from now until `publish`. See [Note: edits]."""

    def __init__(
        self, state: ShardedState, edits: Edits, rank: int, params: Sequence[_FullParam]
    ) -> None:
        """Remember the values on ``rank``. Takes their memory there once more."""
        if not 0 <= rank < state.control.world_size:
            raise ValueError(
                f"modifier_rank = {rank}: expected a rank below {state.control.world_size}"
            )
        self._state = state
        self._edits = edits
        self._rank = rank
        self._params = list(params)
        self._is_own = state.control.rank == rank
        self._before = [p.tensor.clone() for p in self._params] if self._is_own else []

    @torch.no_grad()
    def publish(self) -> None:
        """Broadcast the values of ``rank``. Every rank must call it."""
        self._state.quiesce()  # others may still be gathering the old values
        if not self._params:
            return
        found = torch.tensor([self._compare(i) for i in range(len(self._params))])
        found = found.to(self._state.device)
        self._state.control.broadcast(found, source=self._rank)
        for full, change in zip(self._params, found.tolist(), strict=True):
            if change == _RESHAPED:
                raise ValueError(
                    f"{self._spec_of(full).name} was given another shape within gathered(), on "
                    f"rank {self._rank}: expected {tuple(full.tensor.shape)} in "
                    f"{full.tensor.dtype}; change shapes before build()"
                )
        for index, change in enumerate(found.tolist()):
            self._spread(index, is_changed=change == _CHANGED)

    def _compare(self, index: int) -> float:
        if not self._is_own:
            return _SAME
        full = self._params[index]
        now, before = full.param.data, self._before[index]
        if now.shape != before.shape:
            return _RESHAPED
        if full.flat.segment.is_opaque:
            if now.dtype != before.dtype:
                return _RESHAPED
            spec = self._spec_of(full)
            is_same = torch.equal(spec.to_elements(now), spec.to_elements(before).to(now.device))
            return _SAME if is_same else _CHANGED
        # What replaced ``data`` may have another dtype and device.
        now = now.to(before)
        differs = (now != before) & ~(now.isnan() & before.isnan())
        return _CHANGED if bool(differs.any()) else _SAME

    def _spread(self, index: int, *, is_changed: bool) -> None:
        full = self._params[index]
        values = self._spec_of(full).to_elements(full.tensor)  # a view
        if self._is_own:
            full.tensor.copy_(full.param.data)
        # Unchanged ones too: other ranks may have written to theirs.
        self._state.control.broadcast(values, source=self._rank)
        (full.flat.edit if is_changed else full.flat.write)(full.slot.start, values)
        is_suspect = is_changed or self._edits.is_marked(self._spec_of(full).name)
        piece = self._state.piece_of(full.slot.param)
        if is_suspect and piece is not None:
            self._edits.write_back(piece, values)

    def _spec_of(self, full: _FullParam) -> ParamSpec:
        return self._state.layout.params[full.slot.param]


def _has_own_slice(full: _FullParam, spec: ParamSpec) -> bool:
    """Whether the value still has the bits of this rank's shard, where it has any."""
    flat = full.flat
    start, stop = full.slot.common(*flat.segment.shard_range(flat.rank))
    if start == stop:
        return True
    shard = flat.part_of(full.position, flat.source.read())
    own = spec.to_elements(full.tensor)[start:stop].to(shard.device)
    return torch.equal(own.view(torch.uint8), shard.view(torch.uint8))
