"""Flat parameters: the values of one segment, sharded or gathered.

See [Note: the tensors of a segment] in `zero_core.sharded.unit`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from zero_core._torch import storage_of
from zero_core.comm.communicator import Communicator
from zero_core.layout.arithmetic import Segment
from zero_core.layout.stored import dim_order, from_bytes, to_bytes
from zero_core.protocols import EXACT_PARAMETERS, StateTier, Work
from zero_core.sharded.pool import BufferPool, RefilledBuffers
from zero_core.watch.place import UPDATE

_NO_VERSION = -1
# One pass in C, as it runs for every parameter of every gather.
_set_data = Tensor.data.__set__  # type: ignore[attr-defined]


class ParamState(Enum):
    """State of flat parameters: which memory holds the values, and who owns it."""

    SHARDED = "sharded"
    """Only the shard holds values, in the memory of its `ShardSource`. Parameters are
    placeholders (NaN, or 0 for integer dtypes), but for those of which somebody holds a copy
    (`FlatParams.hold`)."""
    GATHERING = "gathering"
    """A collective writes to ``full``, a buffer lent by the pool. Nobody else may read it.
    Set while the first gather into a borrowed buffer is under way. A gather of newer values into a
    buffer that is held does not change the state: see `FlatParams.is_current`."""
    UNSHARDED = "unsharded"
    """``full``, a buffer lent by the pool until `FlatParams.release`, holds the values; the
    parameters are views of it."""
    KEPT = "kept"
    """``full`` is in the arena for good, and the shard is a view of it. The parameters are views,
    too; a gather overwrites the other ranks' slices with their updates."""


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
        """Whether no update of the shard is under way."""
        return self.span is None or self._tier.are_params_ready(*self.span)

    def wait_update(self) -> None:
        """Wait until the shard holds its updated values."""
        if self.span is not None:
            with self._communicator.place.during(UPDATE):
                self._tier.wait_params(*self.span)

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

    def gather(self, full: Tensor, *, version: int, backward: bool) -> Work:
        self.wait_update()
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
        slots: one per parameter, in its shape.
        gaps: of what belongs to no parameter.
    """

    slots: list[Tensor]
    gaps: list[Tensor]


class SegmentViews:
    """Views of buffers and placeholders, for all segments of equal slots and shapes.

    The units of a model are mostly alike, and use the same few buffers in turn. What they share is
    in the processor's cache when the next one needs it.
    """

    def __init__(self, segment: Segment, params: Sequence[Tensor], device: torch.device) -> None:
        """Prepare for buffers of ``segment``'s length, and make the placeholders on ``device``."""
        self._is_opaque = segment.is_opaque
        self._slots = [
            (slot.start, slot.stop, param.shape)
            for slot, param in zip(segment.slots, params, strict=True)
        ]
        # What components look like, as their parameters know them.
        self._forms = [(p.dtype, dim_order(p)) for p in params] if self._is_opaque else []
        self._gaps = list(segment.gaps())
        self._found: dict[tuple[int, torch.dtype], BufferViews] = {}
        dtypes = [dtype for dtype, _ in self._forms] or [segment.dtype] * len(params)
        hole_of = {dtype: _hole(dtype, device) for dtype in dict.fromkeys(dtypes)}
        holes = [hole_of[d].expand(p.shape) for d, p in zip(dtypes, params, strict=True)]
        self.placeholders = BufferViews(holes, [])

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
            found = self._found[key] = BufferViews(slots, gaps)
        return found

    def _slots_of(self, full: Tensor) -> list[Tensor]:
        if not self._is_opaque:
            return [full[start:stop].view(shape) for start, stop, shape in self._slots]
        return [
            from_bytes(full[start:stop], dtype, shape, order)
            for (start, stop, shape), (dtype, order) in zip(self._slots, self._forms, strict=True)
        ]


def _hole(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return NaN, or 0 for integers, as a tensor without dimensions."""
    if not dtype.is_floating_point:
        return torch.zeros((), dtype=dtype, device=device)
    if dtype.itemsize > 1:
        return torch.full((), float("nan"), dtype=dtype, device=device)
    # All bits set are NaN in most 8-bit formats; not all of them can be filled.
    return torch.full((1,), 255, dtype=torch.uint8, device=device).view(dtype)[0]


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
    ) -> None:
        """Manage ``params``, one per slot. `adopt` then takes their storage over.

        Args:
            kept: ``full`` if it is in the arena for good, else None: ``pool`` lends it.
            has_remote_updates: whether other ranks update slices of it.
            views: of this segment and those that are like it.
        """
        self.segment = segment
        self.params = list(params)
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
        self._moved: int | None = None  # position of a parameter that was moved while UNSHARDED
        self._views = views
        self._placeholders = views.placeholders
        # Copies that parameters are views of while SHARDED, and their holders, by position.
        self._copies: dict[int, Tensor] = {}
        self._num_holders: dict[int, int] = {}

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
        self.finish_gather()  # an older gather, started ahead and never used, may still write
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

    def wait(self) -> None:
        """Wait for the gather, and make the parameters views of ``full``."""
        self.finish_gather()
        if not self._are_views_set:
            list(map(_set_data, self.params, self._current_views().slots))
            self._are_views_set = True

    def finish_gather(self) -> None:
        """Wait for the gather that is under way, if one is.

        Raises:
            CollectiveError: it failed. The values are sharded again then.
        """
        if self._work is not None:
            work, self._work = self._work, None
            try:
                work.wait()
            except BaseException:
                self._full_version = _NO_VERSION
                if not self.is_kept:  # the pool lends it to nobody: late bytes may still arrive
                    self._set_placeholders()
                    self.full = None
                raise

    def release(self) -> None:
        """Return ``full`` to the pool, unless it is kept."""
        full = self.full
        if self.is_kept or full is None:
            return
        self.finish_gather()
        if self._are_views_set and self._moved is None:
            self._moved = self._find_moved()
        self._set_placeholders()
        self._pool.release(full)
        self.full = None
        self._full_version = _NO_VERSION

    def invalidate(self) -> None:
        """Note that shards have new values: what is gathered is stale from now on."""
        self.version += 1

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

    def misplaced(self) -> int | None:
        """Return the position of a parameter whose ``data`` other code has replaced, or None.

        One that was replaced between a gather and its release is returned once.
        """
        moved, self._moved = self._moved, None
        return self._find_moved() if moved is None else moved

    def _find_moved(self) -> int | None:
        found = list(map(Tensor.data_ptr, self.params))
        expected = self._expected_addresses()
        if found == expected:
            return None
        return next(i for i, address in enumerate(expected) if found[i] != address)

    def _expected_addresses(self) -> list[int]:
        if self._are_views_set:
            expected = self._current_views().slots
        else:
            holes = enumerate(self._placeholders.slots)
            expected = [self._copies.get(position, hole) for position, hole in holes]
        return list(map(Tensor.data_ptr, expected))

    def refresh(self) -> None:
        """Bring kept values up to date where no gather is needed: wait for the tier's update."""
        if not self._is_gathered:
            self._source.wait_update()
            self._full_version = self.version

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
                elements = self._elements_of(copy)
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
            self.wait()
        else:
            self._set_placeholders()

    def abandon(self) -> None:
        """Make the parameters placeholders, unless they hold the current values. It is the end."""
        if not self.is_current:
            self._set_placeholders()

    def vacate(self) -> None:
        """Make the parameters placeholders, as the memory of kept values is about to be emptied.

        A backward through what autograd saved of them is refused by torch from now on.
        """
        if self.is_kept:
            self.finish_gather()
            for param in self.params:
                torch.autograd.graph.increment_version(param)
            self._set_placeholders()
            self._full_version = _NO_VERSION

    def reoccupy(self) -> None:
        """Note that the memory of kept values is there again, at another address."""
        if self.is_kept:
            assert self.full is not None
            self.address = self.full.data_ptr()

    def restore(self, position: int) -> bool:
        """Make the parameter at ``position`` a view again, if its ``data`` was replaced.

        Returns:
            Whether it was.
        """
        if self._are_views_set:
            tensor = self._current_views().slots[position]
        else:
            tensor = self._copies.get(position, self._placeholders.slots[position])
        found = self.params[position]
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
                self.params[position].data = copy
        return self._copies[position]

    def drop(self, position: int) -> None:
        """End one `hold`. The copy goes with its last holder."""
        self._num_holders[position] -= 1
        if self._num_holders[position]:
            return
        del self._copies[position]
        if not self._are_views_set:
            self.params[position].data = self._placeholders.slots[position]

    def _elements_of(self, values: Tensor) -> Tensor:
        """Return the elements of a parameter's dense ``values``, as a view."""
        return to_bytes(values, dim_order(values)) if self.segment.is_opaque else values.view(-1)

    def _set_placeholders(self) -> None:
        values = self._placeholders.slots
        if self._copies:
            values = [self._copies.get(position, hole) for position, hole in enumerate(values)]
        list(map(_set_data, self.params, values))
        self._are_views_set = False

    def _current_views(self) -> BufferViews:
        assert self.full is not None
        return self._views.of(self.full)


def is_placeholder(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a NaN placeholder that an engine left after its end."""
    can_tell = tensor.numel() > 1 and (tensor.is_floating_point() or tensor.is_complex())
    if not can_tell or tensor.layout is not torch.strided or any(tensor.stride()):
        return False
    value = tensor.detach()[(0,) * tensor.ndim].item()
    return bool(value != value)  # NaN alone
