"""Snapshots of a rank's state in memory, made beside the next step. See [Note: two slots]."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero_core._libc import use_one_core
from zero_core.checkpoint.files import newest_step
from zero_core.checkpoint.in_memory.place import Place, check_launcher
from zero_core.checkpoint.in_memory.recovery import Snapshot, find_newest, open_snapshot
from zero_core.checkpoint.in_memory.slot import (
    Ring,
    Slice,
    Slot,
    drop_others,
    drop_strangers,
    slot_folders,
)
from zero_core.checkpoint.json_values import encode
from zero_core.checkpoint.load import check_fits, restore_from
from zero_core.checkpoint.manifest import BUFFERS, RNG, VALUE, WHOLE, file_name, seal
from zero_core.checkpoint.save import (
    frame_of,
    frozen_slices,
    own_scalars,
    random_states,
    slices,
    whole_states,
)
from zero_core.checkpoint.storage.location import Location
from zero_core.comm.groups import backend_on
from zero_core.comm.queues import HostQueues
from zero_core.comm.topology import Ranks
from zero_core.config import MemoryCheckpointConfig
from zero_core.core.extension import EndedStep, Extension
from zero_core.errors import ConfigError
from zero_core.optim.train_state import TrainState
from zero_core.optim.whole_tier import WholeTier
from zero_core.protocols import Work
from zero_core.sharded.sharded_state import MASTER, ShardedState
from zero_core.sharded.snapshot import stream_after


class MemoryCheckpoints(Extension):
    """Snapshots of one engine: made after a step, found and restored after a restart."""

    def __init__(
        self,
        state: ShardedState,
        train: TrainState,
        settings: MemoryCheckpointConfig,
        ranks: Ranks,
        per_node: int,
    ) -> None:
        """Prepare. `open` gives the folder. Every rank must call it."""
        self._ring: Ring | None = None  # sends copies to the next node
        if settings.copies and per_node < ranks.size:
            if ranks.has_own_device and backend_on(ranks.group, torch.device("cpu")) is None:
                raise ConfigError(
                    "memory_checkpoint.copies = 1 sends memory of the host between nodes: have the "
                    'process group serve it by init_process_group("cpu:gloo,cuda:nccl"), or set '
                    "memory_checkpoint.copies to 0"
                )
            self._ring = Ring(
                ranks.messages(), rank=ranks.rank, world_size=ranks.size, per_node=per_node
            )
        self._state = state
        self._train = train
        self._every = settings.every
        self._path = settings.path
        self._per_node = per_node
        self._queue = HostQueues()
        self._under_way: Work | None = None
        self._is_read = threading.Event()  # of the last snapshot
        self._is_read.set()
        self._place: Place | None = None
        self._slots: list[Slot] = []
        self._frozen_versions = [-1, -1]  # in each slot
        self._serial = 0
        self._num_made = 0
        self._attempt = ""  # set at the first snapshot
        self._is_continued = False  # the snapshot that was restored is still needed

    # ------------------------------------------------------------------ making

    def open(self, directory: Location) -> None:
        """Take the folder for copies of what is saved in ``directory``. Every rank must call it."""
        self.remove()
        if self._path is None:
            check_launcher()
        control = self._state.control
        self._place = control.together(
            "memory_checkpoint: open", lambda: Place(self._path, directory, control.rank)
        )
        self._slots = [Slot(folder) for folder in slot_folders(self._place.folder)]
        self._restart()

    def before_update(self, number: int) -> None:
        """Wait for the snapshot under way: states are about to be written."""
        if self._place is None:
            raise RuntimeError(
                "memory_checkpoint keeps copies for engine.resume(directory): call it after "
                "build(), before the first step"
            )
        self.before_write()

    def stepped(self, ended: EndedStep) -> None:
        """Start to make a snapshot, if it is due."""
        if ended.number % self._every:
            return
        state, place = self._state, self._place
        assert place is not None, "checked before the step"
        if not self._attempt:
            token = uuid.uuid4().hex
            self._attempt = state.control.gather_bytes(token.encode())[0].decode()
            if not self._is_continued:
                drop_others(place.folder, self._attempt)
        self._serial += 1
        self._num_made += 1
        content = {
            "progress": encode(self._train.state_dict(), "progress"),
            "client_state": encode(ended.client_state, "client_state"),
        }
        rank, device = state.control.rank, state.device
        tensors = {file_name(RNG, rank): random_states()}
        if rank == 0:
            tensors[BUFFERS] = state.buffers()
        for name in state.extension_states():
            tensors[file_name(name, rank)] = state.extension_slices(name)
        facts = {
            "attempt": self._attempt,
            "serial": self._serial,
            "rank": rank,
            "world_size": state.control.world_size,
            "step": ended.number,
            "frame": frame_of(state) | content if rank == 0 else None,
        }
        is_here = device.type == "cpu"
        done = None if is_here else torch.accelerator.current_stream(device).record_event()
        frozen = [s.index for s in state.layout.segments if not s.is_trainable]
        frozen_version = sum(state.params[index].version for index in frozen)
        is_read = threading.Event()
        make = partial(self._make, facts, tensors, random.getstate(), frozen_version, done, is_read)
        self._under_way = self._queue.launch(make, is_reduction=False)
        self._is_read = is_read

    def before_write(self) -> None:
        """Wait for the snapshot under way."""
        work, self._under_way = self._under_way, None
        if work is not None:
            work.wait()

    @torch.no_grad()
    def _make(
        self,
        facts: dict[str, Any],
        tensors: dict[str, dict[str, Tensor]],
        python_random: Any,
        frozen_version: int,
        done: torch.Event | None,
        is_read: threading.Event,
    ) -> None:
        """Write a snapshot, and send it to the next node.

        ``tensors`` are copies of what the next forward changes, by file. On an accelerator ``done``
        fires at the end of the update. ``is_read``: this rank has read its states, or failed to.
        """
        slot, frozen = self._slots[facts["serial"] % 2], file_name(VALUE, facts["rank"])
        try:
            use_one_core()
            with stream_after(done, self._state.device):
                if self._num_made == 2:  # the first one is whole on all ranks
                    self._drop_strangers()
                slot.invalidate(facts["rank"])
                names, written, wholes = self._write(slot, tensors)
                sent = dict(written)
                if self._frozen_versions[facts["serial"] % 2] != frozen_version:
                    sent[frozen] = slot.write(frozen, frozen_slices(self._state))
                written[frozen] = slot.size(frozen)
                row = [own_scalars(self._state), python_random, wholes]
                marker = seal({**facts, "states": names, "files": written, "row": row})
                slot.commit(facts["rank"], marker)
        finally:
            is_read.set()
        if self._ring is not None:
            self._ring.swap(slot, sent, marker)
        self._frozen_versions[facts["serial"] % 2] = frozen_version

    def _write(
        self, slot: Slot, tensors: dict[str, dict[str, Tensor]]
    ) -> tuple[list[str], dict[str, int], dict[str, Any]]:
        """Write this rank's states and ``tensors``. Returns names, files and whole states."""
        state, tier, rank = self._state, self._state.tier, self._state.control.rank
        names, written = list(tier.state_names()), {}
        for name in names:  # as a save writes them, one at a time
            parts: Mapping[str, Tensor | Slice]
            if name != MASTER and isinstance(tier, WholeTier):
                parts = slices(state, tier, name)
            else:
                # On a CPU few elements, which stay in its cache until they are written.
                block_numel = 1 << 18 if state.device.type == "cpu" else 1 << 23
                parts = {
                    str(s.index): Slice(tier, name, *state.own_span(s.index), block_numel)
                    for s in state.layout.segments
                    if s.is_trainable
                }
            written[file_name(name, rank)] = slot.write(file_name(name, rank), parts)
        wholes: dict[str, Any] = {}
        if isinstance(tier, WholeTier):
            wholes = whole_states(state, tier, tensors.setdefault(file_name(WHOLE, rank), {}))
        written |= {file: slot.write(file, values) for file, values in tensors.items()}
        return [*names, *state.extension_states()], written, wholes

    def _drop_strangers(self) -> None:
        """Remove the files of ranks that are not here any more, on the first rank of a node."""
        rank, world_size = self._state.control.rank, self._state.control.world_size
        if rank % self._per_node or self._place is None:
            return
        here = range(rank, rank + self._per_node)
        copied = {(r - self._per_node) % world_size for r in here} if self._ring else set()
        drop_strangers(self._place.folder, {*here, *copied})

    # --------------------------------------------------------------- restoring

    def newer_state(
        self, directory: Location, last_step: int | None
    ) -> Callable[[], dict[str, Any]] | None:
        """Open the folder for ``directory``. Return what restores the newest whole snapshot."""
        self.open(directory)
        assert self._place is not None
        found = find_newest(self._state, self._place.folder, last_step)
        rows = self._state.control.gather_bytes(str(newest_step(directory)).encode())
        if found is None or found.step < max(map(int, rows)):
            return None
        return partial(self._restore, found)

    def _restore(self, snapshot: Snapshot) -> dict[str, Any]:
        assert self._place is not None, "it was open"
        state, control = self._state, self._state.control
        reader = open_snapshot(state, self._place.folder, snapshot)
        control.together("memory_checkpoint: check", lambda: check_fits(state, reader, self._train))
        client_state = restore_from(reader, state, self._train)
        self._restart()
        self._serial, self._is_continued = snapshot.serial, True
        return client_state

    def loaded(self, folder: str, seconds: float) -> None:
        """Let the next snapshot replace all others: the states were loaded from elsewhere."""
        if self._place is not None:
            self._restart()
            drop_others(self._place.folder, "")

    def _restart(self) -> None:
        self._attempt, self._num_made, self._is_continued = "", 0, False
        self._frozen_versions = [-1, -1]

    def remove(self) -> None:
        """Stop, on this rank alone. Snapshots stay for whoever is started anew.

        One that is under way reads the states first, which may change after this. It may wait for a
        neighbour that is gone: nobody waits for that.
        """
        self._is_read.wait()
        work, place = self._under_way, self._place
        self._under_way, self._place, self._slots = None, None, []
        if place is None:
            return
        if work is None:
            place.close()
        else:  # its end frees the folder: it may still write the copy of a neighbour there
            self._queue.launch(place.close, is_reduction=False)
