"""Flat parameters: the values of one segment, sharded or gathered.

See [Note: the tensors of a segment] in `zero_core.core.unit`.

[Note: states of flat parameters]
sharded     Only the shard holds values, in the memory of its `Shard`. Parameters are
            placeholders, and reading one raises, unless it has a copy (`ShownParams.hold`).
gathering   A collective writes to ``full``, a buffer from the pool, which must not be read. If
            ``full`` already held older values, parameters remain views, but are not *current*.
unsharded   ``full``, borrowed from the pool until `FlatParams.release`, holds the values. The
            parameters are views of ``full``.
kept        ``full`` is always in the arena. The shard and the parameters are views of ``full``. A
            gather overwrites the slices of other ranks with their updated values. Until that
            gather ends, parameters are deferred: see [Note: access] in `zero_core.core.access`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from zero_core.comm.communicator import Communicator
from zero_core.comm.place import UPDATE
from zero_core.comm.queues import HostQueues, Pending
from zero_core.core import access
from zero_core.core.pool import BufferPool, CopyStream
from zero_core.layout.arithmetic import Segment
from zero_core.protocols import EXACT_PARAMETERS, StateTier, Work

_NO_VERSION = -1


class Shard:
    """This rank's shard of a segment, in device memory. A subclass may keep it elsewhere.

    Attributes:
        span: the shard's range in the local flat space of the state tier, or None if frozen.
        is_on_device: whether the device keeps the shard.
    """

    def __init__(
        self,
        segment: Segment,
        values: Tensor | None,
        communicator: Communicator,
        tier: StateTier | None,
        span: tuple[int, int] | None,
    ) -> None:
        """``values``: None if a subclass has them. ``tier``: None if its ``step`` ends updates."""
        self.span = span
        self.is_on_device = values is not None
        self._segment = segment
        self._values = values
        self._communicator = communicator
        self._tier = tier

    def is_updated(self) -> bool:
        """Return whether no update of the shard is under way or has failed."""
        return self._tier is None or not self.span or self._tier.are_params_ready(*self.span)

    def wait_update(self, *, is_beside: bool = False) -> None:
        """Wait until the shard holds its updated values.

        ``is_beside``: whether the caller is not the training thread.
        """
        if self._tier is not None and self.span is not None:
            is_at_once = is_beside or self._tier.are_params_ready(*self.span)
            with nullcontext() if is_at_once else self._communicator.place.during(UPDATE):
                self._tier.wait_params(*self.span)  # even if ready: this orders streams and threads

    def gather(
        self, full: Tensor, *, version: int, backward: bool, is_beside: bool = False
    ) -> Work:
        """Start to fill ``full`` ([padded_numel]) with every rank's updated shard.

        ``version``, ``backward``: see `zero_core.protocols.Collectives.all_gather`.
        """
        if self._tier is not None:
            self.wait_update(is_beside=is_beside)
        return self._communicator.all_gather(
            full, self.read(), self._segment.index, version=version, backward=backward
        )

    def read(self) -> Tensor:
        """Return the shard, [shard_numel], for reading only."""
        assert self._values is not None, "a subclass without them overrides this method"
        return self._values

    def write(self, start: int, values: Tensor) -> None:
        """Overwrite elements from ``start`` on. No copy from the shard may be under way."""
        self.read()[start : start + values.numel()].copy_(values)

    def synchronize(self) -> None:
        """Block until no copy from the shard is under way. A shard on the device has none."""


class Launcher:
    """Starts gathers in a background thread, in order, each after the update of its shard."""

    def __init__(self, device: torch.device) -> None:
        self._queue = HostQueues()
        self._stream = CopyStream(device)

    def begin(self) -> None:
        """Make later gathers wait for the work that is now queued on the caller's stream."""
        self._stream.follow()

    def gather(self, source: Shard, full: Tensor, *, version: int) -> Work:
        """Queue a gather of ``source``. It starts after the gathers queued before it."""
        gathers: list[Work] = []

        def launch() -> None:
            with self._stream:
                gathers.append(source.gather(full, version=version, backward=False, is_beside=True))

        launched = self._queue.launch(launch, is_reduction=False)

        def wait() -> None:
            launched.wait()
            gathers[0].wait()

        return Pending(wait)


class FlatParams:
    """The values of one segment. [Note: states of flat parameters] describes their states.

    Attributes:
        full: [padded_numel], or None while sharded.
        version: increases whenever values may have changed, as far as this rank knows.
        is_kept: whether ``full`` is always in the arena.
        is_exchanged: whether a gather exchanges values with other ranks.
        edited: positions of parameters that `edit` has overwritten, until a caller clears the set.
        publishing: the engine's lock, held while values change and their exchange is launched.
        is_deferred: whether reads wait for a gather that the unit set has started.
        await_tail: waits for the tail's gather. None except for sharded parameters of the tail.
    """

    def __init__(
        self,
        segment: Segment,
        shown: access.ShownParams,
        *,
        rank: int,
        device: torch.device,
        source: Shard,
        kept: Tensor | None,
        pool: BufferPool,
        has_remote_updates: bool,
    ) -> None:
        """Create without changing the parameters. `adopt` replaces their storage later.

        ``kept`` is ``full`` if it is in the arena, or None if ``pool`` lends ``full``.
        ``has_remote_updates``: whether other ranks update slices of ``full``.
        """
        self.segment = segment
        self.shown = shown
        self.params = shown.params
        self._lock = threading.RLock()  # guards waits, because any thread may read a parameter
        self.publishing = threading.RLock()
        self.await_tail: weakref.WeakMethod[Callable[[], None]] | None = None
        self.device = device
        self.full = kept
        self.is_kept = kept is not None
        self.is_exchanged = segment.world_size > 1 and (not self.is_kept or has_remote_updates)
        self.version = 0
        self.rank = rank
        self.edited: set[int] = set()
        self.source = source
        self._pool = pool
        self._full_version = 0 if self.is_kept else _NO_VERSION
        self._work: Work | None = None
        self.is_deferred = False
        access.register(self, shown.read_params)

    def gather(self, *, exact: bool = False, backward: bool = False) -> None:
        """Start to gather the current values into ``full``, unless ``full`` already holds them.

        Blocks until a pending host update has ended. ``exact``: without quantization, even if the
        collectives quantize. ``backward``: whether the gather serves a backward.
        """
        if self._full_version == self.version:
            return
        if self._work is not None:
            # an older prefetched gather may still write to ``full``
            self.finish_gather()
        if self.is_exchanged or not self.is_kept:
            if self.full is None:
                index = self.segment.index
                user = index if self.segment.is_opaque else (index, backward)
                self.full = self._pool.acquire(self.segment.padded_numel, self.segment.dtype, user)
            version = EXACT_PARAMETERS if exact else self.version
            self._work = self.source.gather(self.full, version=version, backward=backward)
        else:
            self.source.wait_update()
        self._full_version = self.version

    def publish(self, launcher: Launcher | None) -> None:
        """Start to exchange stale kept values, after their update.

        ``launcher`` starts the gather in its thread. If None, the calling thread starts it.
        """
        if launcher is None:
            self.gather()
        else:
            self.finish_gather()
            assert self.full is not None, "it is kept"
            self._work = launcher.gather(self.source, self.full, version=self.version)
            self._full_version = self.version

    def wait(self) -> None:
        if not self.shown.is_closed and self._work is None:
            return
        with self._lock:
            if self._work is not None:
                self.finish_gather()
            assert self.full is not None, "it has been gathered"
            self.shown.show(self.full)

    def finish_gather(self) -> None:
        """Wait for the gather that is under way, if any.

        Raises:
            CollectiveError: the gather failed. Values that are not kept are then sharded again.
        """
        work = self._work
        if work is None:
            return
        with self._lock:
            if self._work is not work:  # another thread has finished this gather
                return
            try:
                work.wait()
            except BaseException:
                self._full_version = _NO_VERSION
                if not self.is_kept:  # never reuse the buffer: late data may still arrive
                    self.shown.hide()
                    self.full = None
                raise
            finally:
                self._work = None

    def defer(self) -> None:
        """Make reads wait for a gather that the unit set starts, until `release`."""
        if not (self.is_kept or self.shown.is_shown):
            self.is_deferred = True
            self.shown.defer()

    def release(self) -> None:
        """Return ``full`` to the pool, unless it is kept."""
        full = self.full
        if self.is_kept:
            return
        if full is None:
            if self.is_deferred:
                self.shown.hide()
                self.is_deferred = False
            return
        if self._work is not None:
            self.finish_gather()
        self.shown.withdraw()
        self.is_deferred = False
        self._pool.release(full)
        self.full = None
        self._full_version = _NO_VERSION

    def updated_early(self) -> None:
        """Note that backward has updated this rank's values before the step has ended."""
        self.version += 1
        if self.is_kept:
            self.shown.refuse(access.EARLY)

    def invalidate(self) -> None:
        """Note that the shards have new values, so that gathered values are stale."""
        self.version += 1
        self.shown.why_refused = access.SHARDED
        self.shown.forget_marks()
        if not self.is_kept:
            return
        if self.is_exchanged or not self.source.is_updated():
            self.shown.defer()
        else:
            self.gather()  # does not block, because the update has ended
            self.wait()

    def await_values(self, param: nn.Parameter) -> None:
        """Wait for the current value of the deferred ``param``, and make it readable."""
        await_tail = None if self.await_tail is None else self.await_tail()
        if await_tail is not None:
            await_tail()
            return
        with self.publishing:
            pass  # wait for a thread that is about to launch the gather
        with self._lock:
            if self.is_exchanged and not self.is_gather_launched:
                raise RuntimeError(
                    f"parameter {self.shown.name_of(param)} has no current value here: a step or "
                    "load was broken off on this rank before its values were exchanged. Load a "
                    "checkpoint, on every rank"
                )
            self.gather()
            self.finish_gather()
            if self.device.type != "cpu":  # the reader may use another stream than the training
                torch.accelerator.synchronize(self.device)
            self.wait()

    @property
    def is_current(self) -> bool:
        is_here = self._full_version == self.version and self._work is None
        return is_here and self.shown.is_shown

    @property
    def is_gather_launched(self) -> bool:
        return self._full_version == self.version

    def refresh(self) -> None:
        """Wait for pending kept values. Starts no exchange with other ranks."""
        is_here = self.shown.why_refused is not access.AWAY
        if self.is_kept and is_here and (self.is_gather_launched or not self.is_exchanged):
            self.gather()
            self.wait()

    def part_of(self, position: int, shard: Tensor) -> Tensor:
        """Return the elements of ``shard`` that belong to the parameter at ``position``."""
        slot = self.segment.slots[position]
        low = self.segment.shard_range(self.rank)[0]
        first, last = slot.common(*self.segment.shard_range(self.rank))
        start = max(0, slot.start + first - low)
        return shard[start : start + last - first]

    def edit(self, start: int, values: Tensor) -> None:
        """Overwrite values like `write`, and record the changed parameters in `edited`."""
        self.write(start, values)
        stop = start + values.numel()
        slots = enumerate(self.segment.slots)
        self.edited.update(i for i, slot in slots if slot.start < stop and slot.stop > start)

    def write(self, start: int, values: Tensor) -> None:
        """Overwrite this rank's part of the segment's values from element ``start`` on.

        ``values`` are 1-D, in any dtype (uint8 for a segment of bytes), on any device. Every rank
        that stores any of them must pass equal values. The caller makes sure that no rank gathers
        meanwhile, and calls `invalidate` if gathered values become stale.
        """
        stop = start + values.numel()
        if self.full is not None:
            self.full[start:stop].copy_(values)
        self.shown.write_copies(start, values)
        low, high = self.segment.shard_range(self.rank)
        first, last = max(low, start), min(high, stop)
        if first < last and not self.is_kept:  # a kept shard is a view of ``full``
            self.source.write(first - low, values[first - start : last - start])

    def synchronize(self) -> None:
        self.finish_gather()
        self.source.synchronize()

    def adopt(self) -> None:
        """Replace the parameters' original storage by views of ``full`` or by placeholders."""
        for param in self.params:
            param.grad = None  # otherwise an old gradient would be added to the first new one
        if self.is_kept:
            # A checkpoint load may have shown the parameters.
            self.shown.is_shown, self.shown.is_closed = False, True
            self.wait()
        else:
            self.shown.hide()

    def abandon(self) -> None:
        """Make the parameters placeholders at the engine's end, unless they are current."""
        if not self.is_current:
            self.shown.why_refused = access.ENDED
            self.shown.hide()

    def vacate(self) -> None:
        """Replace the parameters by placeholders before the memory of kept values is freed.

        Afterwards torch refuses a backward that needs saved values of kept parameters.
        """
        if self.is_kept:
            self.refresh()
            for param in self.params:
                torch.autograd.graph.increment_version(param)
            self.shown.hide()
        self.shown.why_refused = access.AWAY

    def reoccupy(self) -> None:
        """Note that the memory of kept values exists again, maybe at another address."""
        self.shown.why_refused = access.SHARDED
        if self.is_kept:
            self.wait()
            self.shown.forget_marks()  # `vacate` has incremented the version counters
