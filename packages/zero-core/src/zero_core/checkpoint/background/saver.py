"""Saves of one engine's checkpoints, at once or in a thread beside training.

[Note: a save beside training]
The call takes what is small, and a snapshot of the states, which copies nothing
(`zero_core.sharded.snapshot`). A thread writes the files and, when all ranks have theirs, completes
the checkpoint, as a synchronous save does. The threads of the ranks agree through the store
(`zero_core.comm.groups.StoreExchange`), never by the collectives of the training.

Frozen values and parameters in host memory are read in place. `ShardedState.quiesce` waits for the
thread before anything but a step writes to them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import Any, Literal

import torch

from zero_core._libc import use_one_core
from zero_core.checkpoint.save import KnownFile, Save, SaveOptions
from zero_core.checkpoint.storage.location import Location
from zero_core.comm.control import Exchange
from zero_core.errors import CheckpointError, CheckpointFailedError, CollectiveError
from zero_core.optim.train_state import TrainState
from zero_core.protocols import SnapshotTier
from zero_core.sharded.sharded_state import ShardedState
from zero_core.sharded.snapshot import Snapshot, StateWatch, stream_after

_log = logging.getLogger(__name__)

OnPending = Literal["wait", "refuse"]


class PendingSave(Future[Location]):
    """A save beside training: a future of the checkpoint's folder.

    ``result()`` waits for it and raises its error: `CheckpointError` on all ranks, or
    `CollectiveError` where a rank is dead. An error that all ranks have asked for here is not
    raised again by the engine.
    """

    def __init__(self, tag: str, snapshot: Snapshot) -> None:
        super().__init__()
        self.tag = tag
        self._snapshot = snapshot
        self.is_asked = False

    @property
    def peak_bytes(self) -> int:
        """Most host memory that copies of states have taken so far."""
        return self._snapshot.peak_bytes

    def result(self, timeout: float | None = None) -> Location:
        self.exception(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        found = super().exception(timeout)
        self.is_asked = True
        return found


class Saver:
    """Saves one engine's checkpoints. See [Note: a save beside training]."""

    def __init__(self, state: ShardedState, progress: TrainState, exchange: Exchange) -> None:
        """Made in one order on all ranks, whose threads alone agree over ``exchange``."""
        self._state = state
        self._progress = progress
        self._exchange = exchange
        self._watch: StateWatch | None = None
        self._pending: PendingSave | None = None
        self._known: Mapping[str, KnownFile] = {}

    def save(
        self, directory: Location, tag: str, client_state: Mapping[str, Any], options: SaveOptions
    ) -> Location:
        """Write a checkpoint at once. Every rank must call it. See `Save`."""
        self._settle("wait")
        save = self._take(Snapshot(self._state, None), directory, tag, client_state, options)
        place = save.write(self._state.control)
        self._known = save.known
        return place

    def start(
        self,
        directory: Location,
        tag: str,
        client_state: Mapping[str, Any],
        options: SaveOptions,
        *,
        on_pending: OnPending,
        max_bytes: int | None,
    ) -> PendingSave:
        """Start to write a checkpoint beside training, on all ranks: see `Engine.async_save`."""
        self._settle(on_pending)
        snapshot = Snapshot(self._state, self._watch, max_bytes)
        try:
            save = self._take(snapshot, directory, tag, client_state, options)
            save.detach()
            if self._watch is None:
                snapshot.keep(0, self._state.local_numel)  # its tier announces no changes
        except BaseException:
            snapshot.end()
            raise
        self._pending = pending = PendingSave(tag, snapshot)
        self._state.readers[:] = [pending]
        threading.Thread(
            target=self._run, args=(pending, save, snapshot), name=f"zero-core save of {tag}"
        ).start()
        return pending

    def _settle(self, on_pending: OnPending) -> None:
        """Have no save under way. Raise its error on all ranks, unless all have asked for it."""

        def settle() -> None:
            pending = self._pending
            if on_pending == "refuse" and pending is not None and not pending.done():
                raise CheckpointError(
                    f"the save of {pending.tag} is under way, and on_pending is 'refuse': save "
                    "later, wait for result() of that one, or choose on_pending='wait'"
                )
            try:
                self.finish()
            except CollectiveError as error:  # of the store, perhaps on this rank alone
                raise CheckpointFailedError(str(error)) from error

        self._state.control.together("checkpoint: prepare", settle)
        if self._watch is None and isinstance(self._state.tier, SnapshotTier):
            self._watch = StateWatch(self._state.tier)

    def finish(self) -> None:
        """Wait for the save under way. Raises its error, unless somebody has asked for it."""
        pending, self._pending = self._pending, None
        if pending is not None and not pending.is_asked:
            pending.result()

    def remove(self) -> None:
        """Wait for the save under way, whose error was logged: the engine ends."""
        if self._pending is not None:
            wait([self._pending])

    def _take(
        self, snapshot: Snapshot, *asked: *tuple[Location, str, Mapping[str, Any], SaveOptions]
    ) -> Save:
        version = None if self._watch is None else self._watch.num_changes
        return Save(self._state, snapshot, self._progress, self._known, version, *asked)

    def _run(self, pending: PendingSave, save: Save, snapshot: Snapshot) -> None:
        failure = None
        try:
            use_one_core()
            with torch.no_grad(), stream_after(snapshot.ready, self._state.device):
                save.write(self._exchange)
            self._known = save.known
        except BaseException as error:
            failure = error
            _log.error(
                "rank %d: the save of %s failed: %s", self._exchange.rank, pending.tag, error
            )
        snapshot.end()
        self._exchange.leave()  # the next save uses it once there is a result
        if failure is None:
            pending.set_result(save.place)
        else:
            pending.set_exception(failure)
