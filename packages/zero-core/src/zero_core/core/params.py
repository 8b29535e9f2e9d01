"""Flat parameters: the values of one segment, sharded or gathered.

See [Note: the tensors of a segment] in `zero_core.core.unit`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zero_core._torch import DisableTorchFunction, storage_of
from zero_core.comm.communicator import Communicator
from zero_core.comm.queues import HostQueues
from zero_core.core import access
from zero_core.core.pool import BufferPool, CopyStream, RefilledBuffers
from zero_core.layout.arithmetic import Segment
from zero_core.layout.discovery import Quantized
from zero_core.layout.stored import dim_order, flatten, from_bytes, to_bytes, unflatten
from zero_core.protocols import EXACT_PARAMETERS, StateTier, Work
from zero_core.watch.place import UPDATE

_NO_VERSION = -1
# Why a parameter refuses to be read, and to be written. Fields are those of `access.Cures`.
_SHARDED = (
    "where stage 3 holds only this rank's shard of it: read it within {read}, which all ranks "
    "enter; or, for the forward of another module, {declare}",
    "where stage 3 holds only this rank's shard of it, so the value would be lost: write it within "
    "{write}, which all ranks enter",
)
_EARLY = (
    "between backward and step(), where it is half updated, as units are updated in backward: do "
    "it before backward or after step(), or set "
    "zero_optimization.offload_optimizer.update_in_backward to false",
) * 2
_AWAY = ("while parameters are offloaded: call reload_states() first, on every rank",) * 2
_ENDED = (
    "after its engine was closed, which left the values of other ranks behind: end an engine with "
    "engine.unwrap() in place of engine.close()",
) * 2
# One pass in C, as it runs for every parameter of every gather.
_set_data = Tensor.data.__set__  # type: ignore[attr-defined]
_get_version = Tensor._version.__get__  # type: ignore[attr-defined]


class ParamState(Enum):
    """State of flat parameters: which memory holds the values, and who owns it."""

    SHARDED = "sharded"
    """Only the shard holds values, in the memory of its `ShardSource`. Parameters are
    placeholders (NaN, or 0 for integer dtypes) that refuse to be read, but for those of which
    somebody holds a copy (`FlatParams.hold`)."""
    GATHERING = "gathering"
    """A collective writes to ``full``, a buffer lent by the pool. Nobody else may read it.
    Set while the first gather into a borrowed buffer is under way. A gather of newer values into a
    buffer that is held does not change the state: see `FlatParams.is_current`."""
    UNSHARDED = "unsharded"
    """``full``, a buffer lent by the pool until `FlatParams.release`, holds the values; the
    parameters are views of it."""
    KEPT = "kept"
    """``full`` is in the arena for good, and the shard is a view of it. The parameters are views,
    too; a gather overwrites the other ranks' slices with their updates. Until it has, parameters
    are deferred: see [Note: access] in `zero_core.core.access`."""


class ShardSource(ABC):
    """This rank's shard of a segment: on the device (`DeviceShard`) or offloaded.

    Attributes:
        span: the part of the local flat space whose update by the state tier the values wait for;
            None if they are frozen.
    """

    def __init__(
        self, communicator: Communicator, tier: StateTier, span: tuple[int, int] | None
    ) -> None:
        self.span = span
        self._communicator = communicator
        self._tier = tier

    def is_updated(self) -> bool:
        """Whether no update of the shard is under way, and none has failed."""
        return self.span is None or self._tier.are_params_ready(*self.span)

    def wait_update(self, *, is_beside: bool = False) -> None:
        """Wait until the shard holds its updated values.

        ``is_beside``: in another thread than the training's, whose place is left alone.
        """
        if self.span is not None:
            is_at_once = is_beside or self._tier.are_params_ready(*self.span)
            with nullcontext() if is_at_once else self._communicator.place.during(UPDATE):
                self._tier.wait_params(*self.span)  # even then: it orders streams and threads

    @abstractmethod
    def gather(self, full: Tensor, *, version: int, backward: bool) -> Work:
        """Start to fill ``full`` ([padded_numel]) with every rank's updated shard.

        ``version``, ``backward``: see `zero_core.protocols.Collectives.all_gather`.
        """

    @abstractmethod
    def read(self) -> Tensor:
        """Return the shard, [shard_numel], not to be changed. Where it rests, so maybe a view."""

    @abstractmethod
    def write(self, start: int, values: Tensor) -> None:
        """Overwrite elements from ``start`` on, while nothing reads them."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until no copy from the shard is under way."""


class DeviceShard(ShardSource):
    """A shard in device memory."""

    def __init__(
        self,
        segment: int,
        shard: Tensor,
        communicator: Communicator,
        tier: StateTier,
        span: tuple[int, int] | None,
    ) -> None:
        super().__init__(communicator, tier, span)
        self._segment = segment
        self._shard = shard

    def gather(
        self, full: Tensor, *, version: int, backward: bool, is_beside: bool = False
    ) -> Work:
        """See `ShardSource.gather`. ``is_beside`` as in `wait_update`."""
        self.wait_update(is_beside=is_beside)
        return self._communicator.all_gather(
            full, self._shard, self._segment, version=version, backward=backward
        )

    def read(self) -> Tensor:
        return self._shard

    def write(self, start: int, values: Tensor) -> None:
        self._shard[start : start + values.numel()].copy_(values)

    def synchronize(self) -> None:
        pass  # nothing is copied elsewhere


class BufferViews(NamedTuple):
    """Views of one buffer.

    Attributes:
        slots: one per parameter, in its shape and with its strides.
        gaps: of what belongs to no parameter.
        addresses: of ``slots``, as they were when the views were made.
    """

    slots: list[Tensor]
    gaps: list[Tensor]
    addresses: list[int]


class SegmentViews:
    """Views of buffers and placeholders, for all segments of equal slots, shapes and strides.

    The units of a model are mostly alike, and use the same few buffers in turn. What they share is
    in the processor's cache when the next one needs it.
    """

    def __init__(self, segment: Segment, params: Sequence[Tensor], device: torch.device) -> None:
        """Prepare for buffers of ``segment``'s length, and make the placeholders on ``device``."""
        self._is_opaque = segment.is_opaque
        self._slots = segment.slots
        # What parameters and components look like, as the model knows them.
        self._forms = [(p.dtype, p.shape, dim_order(p)) for p in params]
        self._gaps = list(segment.gaps())
        self._found: dict[tuple[int, torch.dtype], BufferViews] = {}
        dtypes = [p.dtype if self._is_opaque else segment.dtype for p in params]
        hole_of = {dtype: _hole(dtype, device) for dtype in dict.fromkeys(dtypes)}
        holes = [hole_of[d].expand(p.shape) for d, p in zip(dtypes, params, strict=True)]
        self.placeholders = BufferViews(holes, [], list(map(Tensor.data_ptr, holes)))

    def forget(self) -> None:
        """Forget the views of all buffers, which are gone or have moved."""
        self._found.clear()

    def of(self, full: Tensor) -> BufferViews:
        """Return the views of ``full``, [padded_numel] of a buffer that lives as long as this."""
        # A storage that is refilled has other addresses; its views stay what they are.
        key = (storage_of(full) if self._is_opaque else full.data_ptr(), full.dtype)
        found = self._found.get(key)
        if found is None:
            with torch.inference_mode(False):  # they serve training too
                slots = self._slots_of(full)
                gaps = [full[start:stop] for start, stop in self._gaps]
            addresses = list(map(Tensor.data_ptr, slots))
            found = self._found[key] = BufferViews(slots, gaps, addresses)
        return found

    def _slots_of(self, full: Tensor) -> list[Tensor]:
        return [self.to_values(i, full[s.start : s.stop]) for i, s in enumerate(self._slots)]

    def to_values(self, position: int, elements: Tensor) -> Tensor:
        """Return the ``elements`` of a slot, 1-D, as a view like its parameter."""
        dtype, shape, order = self._forms[position]
        if self._is_opaque:
            return from_bytes(elements, dtype, shape, order)
        return unflatten(elements, shape, order)

    def to_elements(self, position: int, values: Tensor) -> Tensor:
        """Return ``values`` like a parameter, 1-D as its slot has them: a view where it can be."""
        order = self._forms[position][-1]
        return to_bytes(values, order) if self._is_opaque else flatten(values, order)


def _hole(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return NaN, or 0 for integers, as a tensor without dimensions."""
    if not dtype.is_floating_point:
        return torch.zeros((), dtype=dtype, device=device)
    if dtype.itemsize > 1:
        return torch.full((), float("nan"), dtype=dtype, device=device)
    # All bits set are NaN in most 8-bit formats; not all of them can be filled.
    return torch.full((1,), 255, dtype=torch.uint8, device=device).view(dtype)[0]


class Launcher:
    """Starts gathers behind the updates that they wait for, in order, in a thread of its own."""

    def __init__(self, device: torch.device) -> None:
        self._queue = HostQueues()
        self._stream = CopyStream(device)

    def begin(self) -> None:
        """Have the gathers that follow wait for what the caller's stream holds by now."""
        wait = self._stream.after_readers()
        if wait is not None:
            wait()

    def gather(self, source: DeviceShard, full: Tensor, *, version: int) -> Work:
        """Have `DeviceShard.gather` called when the launches before have ended."""
        found = _LateGather(source, full, version, self._stream)
        found.launch = self._queue.launch(found.run, is_reduction=False)
        return found


class _LateGather:
    """A gather that a launcher starts. It ends after its launch."""

    launch: Work

    def __init__(self, source: DeviceShard, full: Tensor, version: int, stream: CopyStream) -> None:
        self._source = source
        self._full = full
        self._version = version
        self._stream = stream
        self._work: Work | None = None

    def run(self) -> None:
        with self._stream:
            self._work = self._source.gather(
                self._full, version=self._version, backward=False, is_beside=True
            )

    def wait(self) -> None:
        self.launch.wait()
        assert self._work is not None, "the launch has succeeded"
        self._work.wait()


class FlatParams:
    """The values of one segment. See [Note: the tensors of a segment] in `unit`.

    Attributes:
        segment: the arithmetic.
        params: the model's parameters, or components of such, in the order of the slots.
        full: [padded_numel], or None while SHARDED.
        address: of ``full``, in memory.
        version: grows when values may have changed, as far as this rank knows.
        is_kept: whether ``full`` is in the arena for good.
        is_exchanged: whether a gather is an exchange with other ranks.
        local_span: see `ShardSource.span`.
        rank: this rank.
        edited: positions of parameters that `edit` has overwritten, until somebody clears them.
        written: position of one that was written while UNSHARDED: see `take_written`.
        read_params: parameters of the model that have values here: what its code reads.
        is_watched: whether what programs write into parameters is compared between the ranks.
        has_masters_apart: whether it must reach other memory than the values, too.
        publishing: held while values change and their exchange is launched; shared by an engine's.
        cures: what errors name.
    """

    def __init__(
        self,
        segment: Segment,
        params: Sequence[Tensor],
        *,
        rank: int,
        device: torch.device,
        source: ShardSource,
        kept: Tensor | None,
        pool: BufferPool | RefilledBuffers,
        has_remote_updates: bool,
        views: SegmentViews,
        names: Sequence[str],
        quantized: Sequence[Quantized] = (),
        has_masters_apart: bool = False,
    ) -> None:
        """Manage ``params``, one per slot. `adopt` then takes their storage over.

        Args:
            kept: ``full`` if it is in the arena for good, else None: ``pool`` lends it.
            has_remote_updates: whether other ranks update slices of it.
            views: of this segment and those that are like it.
            names: of ``params``.
            quantized: the model's parameters that ``params`` are components of, if they are.
            has_masters_apart: whether updates start from other memory than the values.
        """
        self.segment = segment
        self.params = list(params)
        parts = [(q.name, q.param, q.components) for q in quantized] or [
            (name, param, (param,))
            for name, param in zip(names, params, strict=True)
            if isinstance(param, nn.Parameter)
        ]
        self._read_names = [name for name, _, _ in parts]
        self.read_params = [param for _, param, _ in parts]
        position_of = {id(param): position for position, param in enumerate(params)}
        self._read_positions = [
            [position_of[id(c)] for c in components if id(c) in position_of]
            for _, _, components in parts
        ]
        self.is_watched = segment.is_trainable and kept is not None
        self.has_masters_apart = has_masters_apart
        self._versions = list(map(_get_version, self.params))
        self.written: int | None = None
        self.cures = access.Cures()
        self._why_refused = _SHARDED
        self._lock = threading.RLock()  # of waits: any thread may read
        self.publishing = threading.RLock()
        self.device = device
        self.full = kept
        self.address = 0 if kept is None else kept.data_ptr()
        self.is_kept = kept is not None
        self._numel, self._dtype = segment.padded_numel, segment.dtype
        self.version = 0
        self.local_span = source.span
        self.rank = rank
        self.edited: set[int] = set()
        self._source = source
        self._pool = pool
        self._is_gathered = not self.is_kept or has_remote_updates
        self.is_exchanged = self._is_gathered and segment.world_size > 1
        self._full_version = 0 if self.is_kept else _NO_VERSION
        self._work: Work | None = None
        self._are_views_set = False
        self._is_deferred = False  # reads wait for a gather that others are about to start
        self._is_closed = True  # reads wait or raise, but for those of copies
        self._moved: int | None = None  # position of a parameter that was moved while UNSHARDED
        self._views = views
        self._placeholders = self._shown = views.placeholders  # what the parameters are views of
        # Copies that parameters are views of while SHARDED, and their holders, by position.
        self._copies: dict[int, Tensor] = {}
        self._num_holders: dict[int, int] = {}
        access.register(self, self.read_params)

    # ----------------------------------------------------------------- states

    def gather(self, *, exact: bool = False, backward: bool = False) -> None:
        """Start to gather the current values into ``full``, unless it holds them.

        Args:
            exact: unquantized, whatever the collectives do otherwise.
            backward: whether the gather serves a backward pass.

        Raises:
            CollectiveError: an older gather, ahead of a use that never came, has failed.
        """
        if self._full_version == self.version:
            return
        if self._work is not None:
            self.finish_gather()  # an older one, started ahead and never used, may still write
        if self._is_gathered:
            if self.full is None:
                index = self.segment.index
                user = index if self.segment.is_opaque else (index, backward)
                self.full = self._pool.acquire(self._numel, self._dtype, user)
                self.address = self.full.data_ptr()
            # a negative version asks for exact values
            version = EXACT_PARAMETERS if exact else self.version
            self._work = self._source.gather(self.full, version=version, backward=backward)
        else:
            self._source.wait_update()
        self._full_version = self.version

    def publish(self, launcher: Launcher | None) -> None:
        """Start to bring kept values up to date, behind their update.

        ``launcher`` starts the gather; None: this thread does, and waits for the update.
        """
        if launcher is None:
            self.gather()
        elif self._full_version != self.version:
            self.finish_gather()
            assert self.full is not None, "it is kept"
            assert isinstance(self._source, DeviceShard), "what is kept is on the device"
            self._work = launcher.gather(self._source, self.full, version=self.version)
            self._full_version = self.version

    def wait(self) -> None:
        """Wait for the gather, and make the parameters views of ``full``."""
        if not self._is_closed and self._work is None:
            return
        with self._lock:
            if self._work is not None:
                self.finish_gather()
            access.open_all(self.read_params)
            self._is_closed = False
            if not self._are_views_set:
                if self._copies:
                    self._note_written()
                assert self.full is not None, "it has been gathered"
                self._shown = self._views.of(self.full)
                list(map(_set_data, self.params, self._shown.slots))
                self._are_views_set = True

    def _note_written(self) -> None:
        """Note a parameter that was written in memory that is about to be given up."""
        versions = list(map(_get_version, self.params))
        if versions != self._versions:
            pairs = enumerate(zip(versions, self._versions, strict=True))
            self.written = next(position for position, (now, before) in pairs if now != before)
            self._versions = versions

    def _defer(self) -> None:
        self._is_closed = True
        access.defer(self.read_params)

    def finish_gather(self) -> None:
        """Wait for the gather that is under way, if one is.

        Raises:
            CollectiveError: it failed. The values are sharded again then.
        """
        work = self._work
        if work is None:
            return
        with self._lock:
            if self._work is not work:  # another thread has read a parameter meanwhile
                return
            try:
                work.wait()
            except BaseException:
                self._full_version = _NO_VERSION
                if not self.is_kept:  # the pool lends it to nobody: late bytes may still arrive
                    self._set_placeholders()
                    self.full = None
                raise
            finally:
                self._work = None

    def defer(self) -> None:
        """Have reads wait for what others are about to gather, until `release`."""
        if not (self.is_kept or self._are_views_set):
            self._is_deferred = True
            self._defer()

    def release(self) -> None:
        """Return ``full`` to the pool, unless it is kept."""
        full = self.full
        if self.is_kept:
            return
        if full is None:
            if self._is_deferred:
                self._set_placeholders()
            return
        if self._work is not None:
            self.finish_gather()
        if self._are_views_set:
            if self._moved is None:
                self._moved = self._find_moved()
            if list(map(_get_version, self.params)) != self._versions:
                self._note_written()
        self._set_placeholders()
        self._pool.release(full)
        self.full = None
        self._full_version = _NO_VERSION

    def updated_early(self) -> None:
        """Note that this rank's values were updated in backward: the step is not over yet."""
        self.version += 1
        if self.is_kept:
            self._why_refused = _EARLY
            self._is_closed = True
            access.refuse(self.read_params)

    def invalidate(self) -> None:
        """Note that shards have new values: what is gathered is stale from now on."""
        self.version += 1
        self._why_refused = _SHARDED
        self.forget_marks()
        if not self.is_kept:
            return
        if self._is_gathered or not self._source.is_updated():
            self._defer()
        else:
            self.gather()  # this blocks nobody: the device alone waits
            if self._is_closed:
                access.open_all(self.read_params)
                self._is_closed = False

    # ------------------------------------------------------------------ access

    def forget_marks(self) -> None:
        """Count what is in the parameters as this engine's."""
        if self.has_masters_apart:
            access.take_aliased(self.params)
        with DisableTorchFunction():
            self._versions = list(map(_get_version, self.params))

    def take_marks(self) -> list[tuple[int, bool]]:
        """Return positions of parameters that may have been written, and whether they were.

        Since the last call, or since the engine's own last change.
        """
        with DisableTorchFunction():
            before, self._versions = self._versions, list(map(_get_version, self.params))
        found = dict.fromkeys(access.take_aliased(self.params), False)
        if before != self._versions:
            pairs = enumerate(zip(before, self._versions, strict=True))
            found |= {position: True for position, (old, new) in pairs if old != new}
        return sorted(found.items())

    def await_values(self, param: nn.Parameter) -> None:
        """Wait for the value of ``param``: see `zero_core.core.access.ValueHolder`."""
        with self.publishing:
            pass  # another thread may be about to launch the gather
        with self._lock:
            if self.is_exchanged and not self.is_gathered:
                raise RuntimeError(
                    f"parameter {self._name_of(param)} has no current value here: a step or load "
                    "was broken off on this rank before its values were exchanged. Load a "
                    "checkpoint, on every rank"
                )
            self.gather()
            self.finish_gather()
            if self.device.type != "cpu":  # readers may use other streams than the training
                torch.accelerator.synchronize(self.device)
            self.wait()

    @property
    def is_ended(self) -> bool:
        return self._why_refused is _ENDED

    def refusal(self, param: nn.Parameter, *, is_write: bool) -> str:
        """Return why ``param`` cannot be read: see `zero_core.core.access.ValueHolder`."""
        what = f"parameter {self._name_of(param)} was {'written' if is_write else 'read'}"
        why = self._why_refused[is_write].format(**self.cures._asdict())
        return f"rank {self.rank}: {what} {why}"

    def _name_of(self, param: nn.Parameter) -> str:
        return self._read_names[[p is param for p in self.read_params].index(True)]

    # ---------------------------------------------------------------- queries

    @property
    def state(self) -> ParamState:
        if self.is_kept:
            return ParamState.KEPT
        if self.full is None:
            return ParamState.SHARDED
        return ParamState.UNSHARDED if self._are_views_set else ParamState.GATHERING

    @property
    def is_current(self) -> bool:
        """Whether the parameters hold the current values."""
        return self._are_views_set and self._full_version == self.version and self._work is None

    @property
    def is_gathered(self) -> bool:
        """Whether a gather of the current values has ended or is under way."""
        return self._full_version == self.version

    def is_updated(self) -> bool:
        return self._source.is_updated()

    def dtype_of(self, position: int) -> torch.dtype:
        """Dtype of the parameter at ``position``."""
        return self._placeholders.slots[position].dtype

    def has_values_of(self, position: int) -> bool:
        """Whether the parameter at ``position`` holds its current values."""
        return self.is_current or (not self._are_views_set and position in self._copies)

    def take_written(self) -> str | None:
        """Return why the write into a parameter is lost, once, or None: it is no parameter's."""
        position, self.written = self.written, None
        assert position is not None, "there was one"
        param = self.params[position]
        if not isinstance(param, nn.Parameter):
            return None
        return self.refusal(param, is_write=True)

    def misplaced(self) -> int | None:
        """Return the position of a parameter whose ``data`` other code has replaced, or None.

        One that was replaced between a gather and its release is returned once.
        """
        moved, self._moved = self._moved, None
        return self._find_moved() if moved is None else moved

    def _find_moved(self) -> int | None:
        if not (self._are_views_set or self._copies) and access.are_refused(self.read_params):
            return None  # else the objects were swapped, with their classes
        with DisableTorchFunction() if self._is_closed else nullcontext():  # it is no read
            found = list(map(Tensor.data_ptr, self.params))
        expected = self._shown.addresses
        if self._copies and not self._are_views_set:
            slots = enumerate(self._shown.slots)
            expected = [self._copies.get(position, hole).data_ptr() for position, hole in slots]
        elif self.segment.is_opaque:  # refilled, they have other addresses each time
            expected = list(map(Tensor.data_ptr, self._shown.slots))
        if found == expected:
            return None
        return next(i for i, address in enumerate(expected) if found[i] != address)

    def refresh(self) -> None:
        """Wait for kept values that are on their way. Starts no exchange with other ranks."""
        is_here = self._why_refused is not _AWAY
        if self.is_kept and is_here and (self.is_gathered or not self._is_gathered):
            self.gather()
            self.wait()

    @property
    def stored(self) -> tuple[int, int]:
        """The part of the segment that this rank stores."""
        if self.is_kept:
            return 0, self.segment.padded_numel
        return self.segment.shard_range(self.rank)

    # ---------------------------------------------------------- from outside

    def read_shard(self) -> Tensor:
        """Return this rank's slice of the values, [shard_numel]. Not to be changed."""
        return self._source.read()

    def part_of(self, position: int, shard: Tensor) -> Tensor:
        """Return the elements of ``shard``, what `read_shard` gave, of the parameter there."""
        slot = self.segment.slots[position]
        low = self.segment.shard_range(self.rank)[0]
        first, last = slot.common(*self.segment.shard_range(self.rank))
        start = max(0, slot.start + first - low)
        return shard[start : start + last - first]

    def wait_update(self) -> None:
        """Wait until the shard holds its updated values."""
        self._source.wait_update()

    def edit(self, start: int, values: Tensor) -> None:
        """Overwrite values as `write`, by others than the training, and note whose they are."""
        self.write(start, values)
        stop = start + values.numel()
        slots = enumerate(self.segment.slots)
        self.edited.update(i for i, slot in slots if slot.start < stop and slot.stop > start)

    def write(self, start: int, values: Tensor) -> None:
        """Overwrite values from element ``start`` of the segment on, where this rank has them.

        The caller makes sure that no rank gathers, and calls `invalidate` if need be.

        Args:
            start: offset in the segment, in elements.
            values: 1-D, any dtype (uint8 for a segment of bytes) and device, the same on every rank
                that stores any of them.
        """
        stop = start + values.numel()
        if self.full is not None:
            self.full[start:stop].copy_(values)
        for position, copy in self._copies.items():
            slot = self.segment.slots[position]
            first, last = max(start, slot.start), min(stop, slot.stop)
            if first < last:
                elements = self._views.to_elements(position, copy)
                part = elements[first - slot.start : last - slot.start]
                part.copy_(values[first - start : last - start])
        low, high = self.segment.shard_range(self.rank)
        first, last = max(low, start), min(high, stop)
        if first < last and not self.is_kept:  # what is kept holds the shard
            self._source.write(first - low, values[first - start : last - start])

    def synchronize(self) -> None:
        self.finish_gather()
        self._source.synchronize()

    def adopt(self) -> None:
        """Replace the storage that the parameters were built with."""
        for param in self.params:
            param.grad = None  # what an earlier backward left would be added to the first gradient
        if self.is_kept:
            self._are_views_set, self._is_closed = False, True  # a load may have set views before
            self.wait()
        else:
            self._set_placeholders()

    def abandon(self) -> None:
        """Make the parameters placeholders, unless they hold the current values. It is the end."""
        if not self.is_current:
            self._why_refused = _ENDED
            self._set_placeholders()

    def vacate(self) -> None:
        """Make the parameters placeholders, as the memory of kept values is about to be emptied.

        A backward through what autograd saved of them is refused by torch from now on.
        """
        if self.is_kept:
            self.refresh()
            for param in self.params:
                torch.autograd.graph.increment_version(param)
            self._set_placeholders()
        self._why_refused = _AWAY

    def reoccupy(self) -> None:
        """Note that the memory of kept values is there again, at another address."""
        self._why_refused = _SHARDED
        if self.is_kept:
            assert self.full is not None
            self.address = self.full.data_ptr()
            self.wait()
            self.forget_marks()  # `vacate` has moved the versions

    def restore(self, position: int) -> bool:
        """Make the parameter at ``position`` a view again, if its ``data`` was replaced.

        Returns:
            Whether it was.
        """
        tensor = self._shown.slots[position]
        if not self._are_views_set:
            tensor = self._copies.get(position, tensor)
        found = self.params[position]
        with DisableTorchFunction():  # an address is no read
            is_replaced = (found.data_ptr(), found.shape) != (tensor.data_ptr(), tensor.shape)
            if is_replaced:
                found.data = tensor
        return is_replaced

    # ----------------------------------------------------------------- copies

    def copy_of(self, position: int) -> Tensor | None:
        """Return the copy that the parameter at ``position`` is while SHARDED, if there is one."""
        return self._copies.get(position)

    def hold(self, position: int, copy: Tensor | None) -> Tensor:
        """Make the parameter at ``position`` the ``copy`` of its values while SHARDED.

        Holders are counted: where there is a copy already, that one stays, and ``copy`` may be
        None.

        Returns:
            The copy that is in use.
        """
        self._num_holders[position] = self._num_holders.get(position, 0) + 1
        if position not in self._copies:
            assert copy is not None, "the first holder has the values"
            self._copies[position] = copy
            if not self._are_views_set:
                access.open_all(self._find_held())
                self._set_memory(position, copy)
        return self._copies[position]

    def drop(self, position: int) -> None:
        """End one `hold`. The copy goes with its last holder."""
        self._num_holders[position] -= 1
        if self._num_holders[position]:
            return
        del self._copies[position]
        if not self._are_views_set:
            self._set_memory(position, self._placeholders.slots[position])
            self._refuse_absent()

    def _set_memory(self, position: int, memory: Tensor) -> None:
        with DisableTorchFunction():  # a component may belong to a parameter that is refused
            _set_data(self.params[position], memory)

    def _set_placeholders(self) -> None:
        if self._is_closed:
            access.open_all(self.read_params)
        self._shown = self._placeholders
        values = self._shown.slots
        if self._copies:
            values = [self._copies.get(position, hole) for position, hole in enumerate(values)]
        list(map(_set_data, self.params, values))
        self._are_views_set = self._is_deferred = False
        self._is_closed = True
        if self._copies:
            self._refuse_absent()
        else:
            access.refuse(self.read_params)

    def _refuse_absent(self) -> None:
        refused = self.read_params
        if self._copies:
            held = set(map(id, self._find_held()))
            refused = [param for param in refused if id(param) not in held]
        access.refuse(refused)

    def _find_held(self) -> list[nn.Parameter]:
        """Return the parameters whose values are all in copies."""
        return [
            param
            for param, positions in zip(self.read_params, self._read_positions, strict=True)
            if all(position in self._copies for position in positions)
        ]
