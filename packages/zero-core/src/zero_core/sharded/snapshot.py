"""Snapshots of this rank's states, which are read while training continues.

[Note: copied before they change]
Creating a snapshot copies nothing. The snapshot reads a block of states from the tier when needed.
If the tier is about to change an unread block, the changing thread first copies the block. So a
snapshot needs memory only for blocks that training changes before they are read, at most one copy
of this rank's states. Each copy is freed when it has been read. If a state tier cannot announce its
changes (`zero_core.protocols.SnapshotTier`), all of its states are copied first.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_core.protocols import SnapshotTier
from zero_core.sharded.sharded_state import ShardedState

BLOCK_NUMEL = 1 << 20
"""Number of elements of one state that are read or copied at once."""


class StateWatch:
    """Observer of changes of a tier's states: a `zero_core.protocols.ChangeWatcher`."""

    def __init__(self, tier: SnapshotTier) -> None:
        self.tier = tier
        self.num_changes = 0  # number of announced changes
        self.snapshot: Snapshot | None = None  # until its `end`
        tier.watch_changes(self)

    def before_change(self, start: int, stop: int) -> None:
        self.num_changes += 1
        snapshot = self.snapshot
        if snapshot is not None:
            snapshot.keep(start, stop)


@dataclass(frozen=True)
class StateBlocks:
    """A state of one segment's slice on this rank, 1-D, read block by block."""

    dtype: torch.dtype
    shape: tuple[int]
    blocks: Iterator[Tensor]


class Snapshot:
    """This rank's states of all trainable segments at the time of construction.

    Without a watch the states must not change until they have been read.
    """

    def __init__(
        self,
        state: ShardedState,
        watch: StateWatch | None,
        max_bytes: int | None = None,
        *,
        block_numel: int | None = None,
    ) -> None:
        """Wait for pending updates, and start the snapshot: [Note: copied before they change].

        ``max_bytes`` limits the copies: an update that needs more waits until some are read.
        Without a watch there is no limit: the caller first copies everything by `keep`.
        ``block_numel``: elements that are read or copied at once, by default `BLOCK_NUMEL`.
        """
        self.peak_bytes = 0  # maximum of _num_bytes so far
        self._names = list(state.tier.state_names())
        self._read = state.tier.read_state if watch is None else watch.tier.peek_state
        self._watch = watch
        self._max_bytes = None if watch is None else max_bytes
        self._blocks: list[tuple[int, int]] = []
        self._of_segment: dict[int, tuple[range, torch.dtype]] = {}  # by segment: blocks, dtype
        self._nbytes: list[int] = []  # upper bound of each block's size
        numel = block_numel or BLOCK_NUMEL
        for segment in state.layout.segments:
            if segment.is_trainable:
                low, high = state.own_span(segment.index)
                first = len(self._blocks)
                starts = range(low, high, numel)
                self._blocks += [(at, min(at + numel, high)) for at in starts]
                wide = torch.float64 if segment.dtype == torch.float64 else torch.float32
                self._of_segment[segment.index] = range(first, len(self._blocks)), wide
                width = wide.itemsize * len(self._names)
                self._nbytes += [(stop - at) * width for at, stop in self._blocks[first:]]
        self._stops = [stop for _, stop in self._blocks]
        self._changed = threading.Condition()
        self._copies: dict[tuple[int, str], Tensor] = {}
        self._num_bytes = 0  # total size of the copies
        self._unread = [set(self._names) for _ in self._blocks]
        # End of the work enqueued before the snapshot. Reads need not wait for later work.
        self.ready: torch.Event | None = None
        if self._blocks:
            low, _ = self._blocks[0]
            state.tier.read_state(self._names[0], low, low + 1)  # waits for pending updates
        if watch is not None:
            if state.device.type != "cpu":
                self.ready = torch.accelerator.current_stream(state.device).record_event()
            watch.snapshot = self

    def tensor(self, segment: int, name: str) -> StateBlocks:
        """Return state ``name`` of a segment's slice, or zeros if the tier had no such state."""
        blocks, dtype = self._of_segment[segment]
        numel = sum(stop - start for start, stop in (self._blocks[i] for i in blocks))
        if blocks and name in self._names:
            with self._changed:
                copy = self._copies.get((blocks[0], name))
                low, _ = self._blocks[blocks[0]]
                dtype = (self._read(name, low, low + 1) if copy is None else copy).dtype
        return StateBlocks(dtype, (numel,), (self.take(i, name, dtype) for i in blocks))

    def take(self, index: int, name: str, dtype: torch.dtype) -> Tensor:
        """Return a block of state ``name``, and drop its copy. Call it once per block and state."""
        start, stop = self._blocks[index]
        if name not in self._names:
            return torch.zeros(stop - start, dtype=dtype)
        with self._changed:
            values = self._copies.pop((index, name), None)
            if values is None:
                values = self._read(name, start, stop)
            else:
                self._num_bytes -= values.nbytes
            self._unread[index].discard(name)
            self._changed.notify_all()
        return values

    def keep(self, start: int, stop: int) -> None:
        """Copy the unread states of the blocks that overlap ``[start, stop)`` before they change.

        Any thread may call it. With ``max_bytes`` it may wait for the reader.
        """
        for index in range(bisect_right(self._stops, start), len(self._blocks)):
            low, high = self._blocks[index]
            if low >= stop:
                return
            unread = self._unread[index]
            if not unread:  # a block without unread states needs no wait
                continue
            with self._changed:
                while self._max_bytes is not None and self._copies and unread:
                    if self._num_bytes + self._nbytes[index] <= self._max_bytes:
                        break
                    self._changed.wait()
                for name in [*unread]:
                    values = self._copies[index, name] = self._read(name, low, high)
                    self._num_bytes += values.nbytes
                    unread.remove(name)
                self.peak_bytes = max(self.peak_bytes, self._num_bytes)

    def end(self) -> None:
        """Free the copies. States may change freely from now on."""
        if self._watch is not None:
            self._watch.snapshot = None
        with self._changed:
            for unread in self._unread:
                unread.clear()
            self._copies.clear()
            self._num_bytes = 0
            self._changed.notify_all()


def stream_after(event: torch.Event | None, device: torch.device) -> AbstractContextManager[object]:
    """Return a context for a new stream, whose work waits for ``event`` only.

    ``event`` is None on a device without streams.
    """
    if event is None:
        return nullcontext()
    stream = torch.Stream(device)
    stream.wait_event(event)
    return stream
