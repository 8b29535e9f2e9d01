"""Parameters with full values within a context, and changes to parameters by one rank.

[Note: full parameters]
Full values that exist already (kept ones, or those in use by a forward, a backward or another
``gathered``) are not copied. Other selected parameters are copied out of their gathered segments,
one unit at a time, so that only one unit is gathered at a time. While a context of the whole model
is open, no unit is released. A context of selected parameters that is entered meanwhile copies
nothing, and keeps all units gathered until it ends.

[Note: edits]
Changes made by one rank are written to all shards and master weights. Only changed elements of the
master weights are overwritten, because unchanged ones have more bits than their rounded copy.

[Note: parameters saved between two gathers]
A forward may use a parameter, of this engine or another, only within `gathered`: for example a
teacher's head in a fused loss. Torch saves the tensors named by an ``autograd.Function`` only after
the function's forward has returned. By then the context may have ended, and the parameter is a
placeholder or a copy that will be dropped. So the parameter is saved by reference (`_Reference`).
When backward unpacks the reference, the parameter is gathered until that backward ends. Every rank
must unpack it, as every rank must enter `gathered`. References also replace parameters used within
`gathered` but outside of a forward, as in a penalty of the weights: `GatheredParams._watching`.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from zero_core.comm.place import Place
from zero_core.comm.watch import join_few
from zero_core.config import Config
from zero_core.core.params import FlatParams
from zero_core.core.passes import Passes
from zero_core.core.saved import SavedParam, SavedWeights, is_in_backward
from zero_core.core.unit import Unit
from zero_core.errors import RankMismatchError
from zero_core.layout.arithmetic import ParamSpec
from zero_core.lifecycle import owner_of
from zero_core.runtime.device_states import FORWARD_PARTS, DeviceStates
from zero_core.sharded.edits import Edits
from zero_core.sharded.sharded_state import ShardedState

_SAME, _CHANGED, _RESHAPED = 0.0, 1.0, 2.0


class GatheredCalls:
    """Methods of an engine that give access to whole parameters."""

    config: Config
    place: Place
    _device_states: DeviceStates
    _gathering: GatheredParams

    def gathered(
        self, *, modifier_rank: int | None = None, params: Iterable[nn.Parameter] | None = None
    ) -> AbstractContextManager[nn.Module]:
        """Gather the exact values of all parameters, or only of ``params``, within a context.

        By default values are read-only: at stage 3 a change raises an error at the end of the
        context. With ``modifier_rank``, the in-place changes of that rank reach all shards and
        master weights at the end. Every rank must enter the context with the same parameters. For
        read-only use this is not checked: a mismatch hangs. The context needs memory for the
        gathered parameters (``params``, plus one unit at a time), twice on the modifier. Contexts
        may be nested. During its forward or backward, a unit shows the values used there: with qwZ,
        quantized ones.

        Raises:
            ValueError: no such rank, a parameter of another model, or a shape that was changed.
            RankMismatchError: ranks passed ``modifier_rank`` with different parameters or ranks.
            RuntimeError: ``modifier_rank`` was passed within a forward or backward, or parameters
                were changed at stage 3 without ``modifier_rank``, or states are offloaded.
        """
        self._device_states.check("gathered()")
        self._device_states.before_write()
        return self._gathering.some_params(None if params is None else list(params), modifier_rank)

    @property
    def is_gathered(self) -> bool:
        """Whether a context of `gathered` is open."""
        return self._gathering.is_open

    def publish(self) -> None:
        """Wait until this rank has the last step's values, at stages 0 to 2.

        A step only launches the exchange of values. Without `publish` the next forward, or the
        first read of a parameter, waits for the exchange. At stage 3 values stay sharded (see
        `gathered`), but copies made by `keep_small_params` are filled. Every rank must call it.
        """
        self._device_states.check("publish()", FORWARD_PARTS)
        with self.place.during("publish()"):
            self._gathering.publish()

    def keep_small_params(self) -> None:
        """Keep copies of small parameters at stage 3, as DeepSpeed does. `publish` fills them.

        ``stage3_param_persistence_threshold`` limits the size of a parameter,
        ``stage3_model_persistence_threshold`` that of all copies. Every rank must call it.
        """
        self._device_states.check("keep_small_params()")
        zero = self.config.zero_optimization
        limits = zero.stage3_param_persistence_threshold, zero.stage3_model_persistence_threshold
        if self._gathering.small is None:
            self._gathering.small = _SmallParams(self._gathering.state, *limits)


class _FullParam(NamedTuple):
    """A gathered parameter, at ``position`` of ``flat``."""

    flat: FlatParams
    position: int
    param: Tensor
    spec: ParamSpec
    tensor: Tensor  # the gathered values, in the parameter's shape


def _refer(param: nn.Parameter) -> _Reference | None:
    """Return a reference to ``param``, or None if no engine shards it."""
    engine = owner_of(param)
    if not isinstance(engine, GatheredCalls):
        return None
    holder = engine._gathering
    version = holder.version_of(param)
    return None if version is None else _Reference(param, holder, version)


@dataclass(frozen=True)
class _Reference(SavedParam):
    """Reference to a parameter saved by autograd, or to a view of it, with the values' version."""

    param: nn.Parameter
    holder: GatheredParams
    version: int
    # Dtype, shape and strides of the view, and its offset in bytes.
    view: tuple[torch.dtype, torch.Size, tuple[int, ...], int] | None = None

    def gather(self, saved: SavedWeights) -> Tensor:
        param = self.param
        if self.holder.version_of(param) != self.version:
            raise RuntimeError(
                "backward of a forward that ran before the last step or load: a parameter of "
                f"shape {tuple(param.shape)} has changed since; run the forward again"
            )
        if id(param) not in saved.referenced:
            saved.references.enter_context(self.holder.some_params([param], None))
            saved.referenced.add(id(param))
        # With create_graph, nodes of this backward outlive the context. So they need a copy.
        found = param.data.clone() if torch.is_grad_enabled() else param.data
        if self.view is None:
            return found
        dtype, shape, stride, nbytes_before = self.view
        whole = found.view(dtype)
        offset = whole.storage_offset() + nbytes_before // whole.element_size()
        return whole.as_strided(shape, stride, offset)


class GatheredParams:
    """Implementation of `GatheredCalls`, and source of references for saved parameters."""

    def __init__(self, passes: Passes, state: ShardedState, edits: Edits) -> None:
        self._passes = passes
        self._units = passes.units
        self.state = state
        self._edits = edits
        self.small: _SmallParams | None = None  # set by `keep_small_params`
        # For each open context: versions of its read-only parameters, by id.
        self._reading: list[dict[int, int]] = []
        self._edited: set[int] = set()  # ids of parameters that a context may change
        self._units.saved.refer = _refer

    @property
    def is_open(self) -> bool:
        return bool(self._reading)

    def version_of(self, param: nn.Parameter) -> int | None:
        """Return the version of the values of ``param``, or None if it is not sharded here."""
        place = self.state.places.get(id(param))
        return None if place is None or place[0].is_kept else place[0].version

    def publish(self) -> None:
        """Update kept parameters, and copies of small ones, to the current values."""
        for unit in self._units.units:
            if all(flat.is_kept for flat in unit.params):
                self._units.gather_exact(unit)
        if self.small is not None:
            self.small.refresh()

    def remove(self) -> None:
        if self.small is not None:
            self.small.remove()

    @contextmanager
    def some_params(
        self, params: Sequence[nn.Parameter] | None, modifier_rank: int | None
    ) -> Iterator[nn.Module]:
        """Gather ``params`` within the context. If None, gather all and release no unit."""
        self._passes.forward.end_interrupted()
        if modifier_rank is not None:
            self._check_same(modifier_rank, params or ())
        units, full, copies = self._units, list[_FullParam](), list[_FullParam]()
        places = self._find(params or ())
        if params is None:
            units.release_all()
        with units.full_params() if params is None or units.has_full_params else nullcontext():
            try:
                if params is None:
                    for unit in units.units:
                        units.gather_exact(unit)
                    for flat, n in self.state.places.values():
                        full.append(self._full(flat, n, flat.params[n].data))
                for index, own in places.items():
                    full += self._gather(units.units[index], own, copies)
                with self._open(full, modifier_rank):
                    yield self.state.module
            finally:
                for copied in copies:
                    copied.flat.shown.drop(copied.position)

    def _full(self, flat: FlatParams, position: int, tensor: Tensor) -> _FullParam:
        spec = self.state.layout.params[flat.segment.slots[position].param]
        return _FullParam(flat, position, flat.params[position], spec, tensor)

    @contextmanager
    def _open(self, full: list[_FullParam], modifier_rank: int | None) -> Iterator[None]:
        control = self.state.control
        values_before: list[Tensor] = []  # on the modifier only
        if modifier_rank is not None:
            if self._passes.is_running:
                raise RuntimeError(
                    "gathered(modifier_rank=...) within a forward or backward: change parameters "
                    "between steps"
                )
            if not 0 <= modifier_rank < control.world_size:
                raise ValueError(
                    f"modifier_rank = {modifier_rank}: expected a rank below {control.world_size}"
                )
            if modifier_rank == control.rank:
                values_before = [p.tensor.clone() for p in full]
            # Other ranks, or a pending save, may read the values that this context shows.
            self.state.quiesce()
            self._edited.update(id(p.param) for p in full)
        # Changes of these are lost: they are not kept, and no open context may change them.
        lost = [p for p in full if not (p.flat.is_kept or id(p.param) in self._edited)]
        before = {id(p.param): p.param._version for p in lost}
        self._reading.append(before)
        # A graph built within the context, outside of a forward, outlives the values.
        watched = [p.param for p in lost if isinstance(p.param, nn.Parameter)]
        is_watching = watched and not self._passes.is_running and torch.is_grad_enabled()
        try:
            with self._watching(watched) if is_watching else nullcontext():
                yield
            if modifier_rank is not None:
                self._spread(full, modifier_rank, values_before)
                self._edits.forget(p.spec.name for p in full)
                self._units.values_replaced()
                known = {id(p.param): p.param._version for p in full}
                for read in self._reading:
                    read.update((key, known[key]) for key in read.keys() & known.keys())
            else:
                for p in full:  # copy back from memory that user code assigned to ``data``
                    if p.flat.is_kept and p.param.data_ptr() != p.tensor.data_ptr():
                        with torch.no_grad():
                            p.tensor.copy_(p.param.data)
                self._check_unwritten(lost, before)
        finally:
            self._reading = [read for read in self._reading if read is not before]
            if modifier_rank is not None:
                self._edited.difference_update(id(p.param) for p in full)
            for param in full:
                param.flat.shown.restore(param.position)

    def _watching(self, params: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Return a context in which autograd saves references in place of views of ``params``."""
        with torch.no_grad():
            spans = sorted(
                (p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), n)
                for n, p in enumerate(params)
            )
        starts = [start for start, _, _ in spans]

        def pack(tensor: Tensor) -> Tensor | _Reference:
            place = bisect_right(starts, tensor.data_ptr()) - 1
            if place < 0 or tensor.data_ptr() >= spans[place][1]:
                return tensor if tensor.is_leaf else tensor.detach()
            start, _, number = spans[place]
            version = self.version_of(params[number])
            assert version is not None, "it is sharded"
            view = tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() - start
            return _Reference(params[number], self, version, view)

        unpack = partial(self._units.saved.unpack, self._passes.backward)
        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    @torch.no_grad()
    def _spread(self, full: list[_FullParam], rank: int, before: list[Tensor]) -> None:
        """Write the values of ``rank`` to all shards. ``before``: old values, on ``rank`` only."""
        control = self.state.control
        self.state.quiesce()  # other ranks may still gather the old values
        if not full:
            return
        own = [_compare(p, values) for p, values in zip(full, before, strict=False)]
        changes = torch.tensor(own or [_SAME] * len(full)).to(self.state.device)
        control.broadcast(changes, source=rank)
        for p, change in zip(full, found := changes.tolist(), strict=True):
            if change == _RESHAPED:
                raise ValueError(
                    f"{p.spec.name} was given another shape within gathered(), on rank {rank}: "
                    f"expected {tuple(p.tensor.shape)} in {p.tensor.dtype}; change shapes before "
                    "build()"
                )
        for number, (p, change) in enumerate(zip(full, found, strict=True)):
            values = p.spec.to_elements(p.tensor)  # a view of ``p.tensor``
            if before:
                p.tensor.copy_(p.param.data)
            is_new = None
            if change == _CHANGED:
                is_new = values != (p.spec.to_elements(before[number]) if before else values)
                control.broadcast(is_new, source=rank)
            # Also broadcast unchanged values, because other ranks may have written to theirs.
            control.broadcast(values, source=rank)
            slot = p.flat.segment.slots[p.position]
            (p.flat.edit if change == _CHANGED else p.flat.write)(slot.start, values)
            piece = self.state.piece_of(slot.param)
            if piece is not None and (change == _CHANGED or p.spec.name in self._edits.marked):
                self._edits.write_back(piece, values, is_new)

    def _check_unwritten(self, full: Sequence[_FullParam], versions: Mapping[int, int]) -> None:
        """Raise if a parameter in ``full`` has changed, because the change would be lost."""

        def is_changed(p: _FullParam) -> bool:
            if p.param._version != versions[id(p.param)] or p.flat.shown.restore(p.position):
                return True
            # Unchanged values equal the elements in this rank's shard, if there are any.
            slot = p.flat.segment.slots[p.position]
            start, stop = slot.common(*p.flat.segment.shard_range(p.flat.rank))
            if start == stop:
                return False
            shard = p.flat.part_of(p.position, p.flat.source.read())
            own = p.spec.to_elements(p.tensor)[start:stop].to(shard.device)
            return not torch.equal(own.view(torch.uint8), shard.view(torch.uint8))

        changed = [p.spec.name for p in full if is_changed(p)]
        if changed:
            cures = self.state.cures
            raise RuntimeError(
                f"rank {self.state.control.rank}: {join_few(changed)} changed within "
                f"{cures.read}, which only reads: at stage 3 the new values would be lost. Change "
                f"them within {cures.write}, which brings one rank's values to all"
            )

    def _check_same(self, modifier_rank: int, params: Sequence[nn.Parameter]) -> None:
        """Raise if ranks passed different parameters or modifiers, which would deadlock."""
        control = self.state.control
        known = self.state.param_names
        names = sorted({known.get(id(p), "one that is not this engine's") for p in params})
        described = torch.tensor([zlib.crc32(repr((modifier_rank, names)).encode())])
        if len(set(control.gather(described).tolist())) > 1:
            raise RankMismatchError(
                f"rank {control.rank}: gathered() was entered with different parameters (here "
                f"{names[:4] or 'all'}) or another modifier_rank (here {modifier_rank}): give the "
                "same on every rank"
            )

    def _find(self, params: Sequence[nn.Parameter]) -> dict[int, list[tuple[FlatParams, int]]]:
        """Return segment and position of each of ``params``, by unit, in unit order."""
        wanted = set[tuple[FlatParams, int]]()
        for param in params:
            if id(param) not in self.state.places_of:
                is_name = isinstance(cast("object", param), str)
                shown = repr(param) if is_name else f"a parameter of shape {tuple(param.shape)}"
                raise ValueError(f"{shown} is not this engine's: gather those of engine.module")
            wanted.update(self.state.places_of[id(param)])
        found: dict[int, list[tuple[FlatParams, int]]] = {}
        for place in self.state.places.values():
            if place in wanted:
                found.setdefault(place[0].segment.unit, []).append(place)
        return dict(sorted(found.items()))

    def _gather(
        self, unit: Unit, wanted: list[tuple[FlatParams, int]], copies: list[_FullParam]
    ) -> Iterator[_FullParam]:
        """Gather and yield ``wanted`` parameters of ``unit``. Add copied ones to ``copies``."""
        used = [running.unit for running in self._passes.forward.running]
        is_used = is_in_backward() or any(u is unit or (u.is_root and unit.is_tail) for u in used)
        is_needed = self._units.has_full_params or (
            is_used and all(flat.is_current for flat in unit.params)
        )
        copied = [] if is_needed else [place for place in wanted if not place[0].is_kept]
        # Another context's copy gets a further holder below: that context may end first.
        missing = [(flat, n) for flat, n in copied if flat.shown.copy_of(n) is None]
        new: dict[tuple[FlatParams, int], Tensor] = {}
        if missing or len(copied) < len(wanted):
            if not is_needed:
                self._units.release(unit)
            self._units.gather_exact(unit)
            with torch.inference_mode(False):  # otherwise autograd could not use the clones
                new = {(flat, n): flat.params[n].data.clone() for flat, n in missing}
            if not is_needed:
                self._units.release(unit)
        for flat, n in wanted:
            if is_needed or flat.is_kept:
                yield self._full(flat, n, flat.params[n].data)
            else:
                copies.append(self._full(flat, n, flat.shown.hold(n, new.get((flat, n)))))
                yield copies[-1]


def _compare(full: _FullParam, before: Tensor) -> float:
    """Return `_SAME`, `_CHANGED` (values) or `_RESHAPED` (shape, or dtype of opaque bytes)."""
    now = full.param.data
    if now.shape != before.shape:
        return _RESHAPED
    if full.spec.is_opaque:
        if now.dtype != before.dtype:
            return _RESHAPED
        elements = full.spec.to_elements
        return _SAME if torch.equal(elements(now), elements(before).to(now.device)) else _CHANGED
    now = now.to(before)  # user code may have replaced ``data`` by another dtype or device
    differs = (now != before) & ~(now.isnan() & before.isnan())
    return _CHANGED if bool(differs.any()) else _SAME


class _SmallParams:
    """Copies of small parameters for use while their units are released, until `remove`.

    Forward and backward do not use them. ``max_numel`` limits each parameter, ``max_total`` their
    sum, in elements.
    """

    def __init__(self, state: ShardedState, max_numel: int, max_total: int) -> None:
        self._state = state
        self._limits = max_numel, max_total
        self._held: list[tuple[FlatParams, int, Tensor]] | None = None  # tensor: bytes of a copy
        self._nbytes = 0  # largest number of bytes of the copies in one rank's shards

    def _hold(self) -> None:
        """Create the copies, without values."""
        max_numel, max_total = self._limits
        held = self._held = []
        for flat, position in self._state.places.values():
            like = flat.params[position]
            numel = like.numel()
            if flat.is_kept or flat.segment.is_opaque or numel > min(max_numel, max_total):
                continue
            max_total -= numel
            spec = self._state.layout.params[flat.segment.slots[position].param]
            elements = torch.empty(numel, dtype=like.dtype, device=like.device)
            copy = flat.shown.hold(position, spec.to_values(elements))
            held.append((flat, position, spec.to_elements(copy).view(torch.uint8)))
        ranks = range(self._state.control.world_size)
        self._nbytes = max(sum(part.numel() for part in self._parts(rank)) for rank in ranks)

    def _parts(self, rank: int) -> Iterator[Tensor]:
        """Yield the bytes of the copies that are in the shards of ``rank``."""
        for flat, position, content in self._held or ():
            segment = flat.segment
            found = segment.slots[position].common(*segment.shard_range(rank))
            yield content[slice(*(segment.dtype.itemsize * n for n in found))]

    @torch.no_grad()
    def refresh(self) -> None:
        """Fill the copies with the current values. Every rank must call it, between forwards."""
        if self._held is None:
            self._hold()
        if not self._held:
            return
        own = torch.zeros(self._nbytes, dtype=torch.uint8, device=self._state.device)
        start = 0
        for flat, position, _ in self._held:
            flat.source.wait_update()
            part = flat.part_of(position, flat.source.read()).view(torch.uint8)
            own[start : start + part.numel()].copy_(part)
            start += part.numel()
        rows = self._state.control.gather_on_device(own).view(-1, self._nbytes)
        for rank, row in enumerate(rows):
            parts = [part for part in self._parts(rank) if part.numel()]
            if parts:
                sizes = [part.numel() for part in parts]
                torch._foreach_copy_(parts, row[: sum(sizes)].split(sizes))

    def remove(self) -> None:
        for flat, position, _ in self._held or ():
            flat.shown.drop(position)
        self._held = []
