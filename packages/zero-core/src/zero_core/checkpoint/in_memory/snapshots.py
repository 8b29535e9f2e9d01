"""Snapshots of a rank's state in memory, made beside the next step. See [Note: two slots]."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero_core._libc import use_one_core
from zero_core.checkpoint.in_memory.place import Place, check_launcher
from zero_core.checkpoint.in_memory.recovery import Snapshot, find_newest, open_snapshot
from zero_core.checkpoint.in_memory.ring import Ring
from zero_core.checkpoint.in_memory.slot import (
    Slice,
    Slot,
    Values,
    drop_others,
    drop_strangers,
    slot_folders,
)
from zero_core.checkpoint.json_values import encode
from zero_core.checkpoint.load import check_fits, restore_from
from zero_core.checkpoint.manifest import BUFFERS, RNG, VALUE, WHOLE, file_name, seal
from zero_core.checkpoint.save import frame_of, own_scalars, slices, whole_states
from zero_core.checkpoint.storage.location import Location
from zero_core.comm.groups import backend_on
from zero_core.comm.queues import HostQueues
from zero_core.comm.topology import Ranks
from zero_core.config import MemoryCheckpointConfig
from zero_core.errors import ConfigError
from zero_core.optim.train_state import TrainState
from zero_core.optim.whole_tier import WholeTier
from zero_core.protocols import Work
from zero_core.sharded.sharded_state import MASTER, ShardedState
from zero_core.sharded.snapshot import stream_after


@dataclass(frozen=True)
class _Small:
    """Copies of the values that the next forward changes.

    Attributes:
        serial: number of the snapshot.
        step: optimizer steps so far.
        frame: what all ranks have in common; rank 0 keeps it.
        random: states of torch's generators.
        python_random: state of Python's.
        buffers: the model's; rank 0 keeps them.
        frozen_version: of the values of frozen parameters.
        done: fires when the update is done on an accelerator.
        is_read: set when this rank has read its states, or failed to.
    """

    serial: int
    step: int
    frame: dict[str, Any] | None
    random: dict[str, Tensor]
    python_random: Any
    buffers: dict[str, Tensor]
    frozen_version: int
    done: torch.Event | None
    is_read: threading.Event


class MemoryCheckpoints:
    """Snapshots of one engine: made after a step, found and restored after a restart."""

    def __init__(
        self,
        state: ShardedState,
        train: TrainState,
        ring: Ring | None,
        *,
        every: int,
        path: str | None,
        per_node: int,
    ) -> None:
        """Prepare. `open` gives the folder.

        Args:
            state: read by the snapshots.
            train: progress of the training.
            ring: sends copies to the next node. None: there are none.
            every: steps between snapshots.
            path: folder in memory; None is the launcher's.
            per_node: ranks of a node.
        """
        self._state = state
        self._train = train
        self._ring = ring
        self._every = every
        self._path = path
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
        """Take the folder for copies of the training that is saved in ``directory``.

        Every rank must call it.

        Raises:
            ConfigError: nothing here outlives a rank.
            CheckpointError: a rank has no such folder, or it is in use.
        """
        self.remove()
        if self._path is None:
            check_launcher()
        control = self._state.control
        self._place = control.together(
            "memory_checkpoint: open", lambda: Place(self._path, directory, control.rank)
        )
        self._slots = [Slot(folder) for folder in slot_folders(self._place.folder)]
        self._restart()

    def check_open(self) -> None:
        """Refuse a step before `open`.

        Raises:
            RuntimeError: with what to do.
        """
        if self._place is None:
            raise RuntimeError(
                "memory_checkpoint keeps copies for engine.resume(directory): call it after "
                "build(), before the first step"
            )

    def start(self, client_state: Mapping[str, Any]) -> None:
        """Start to make a snapshot, if it is due. Every rank must call it after a step.

        Raises:
            CheckpointError: ``client_state`` cannot be stored.
        """
        if self._train.global_steps % self._every:
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
        rank, device = state.control.rank, state.device
        generators = {"torch": torch.get_rng_state()}
        if torch.cuda.is_available():
            generators["cuda"] = torch.cuda.get_rng_state()
        frame = None
        if rank == 0:
            frame = {
                **frame_of(state),
                "progress": encode(self._train.state_dict(), "progress"),
                "client_state": encode(client_state, "client_state"),
            }
        else:
            encode(client_state, "client_state")
        is_here = device.type == "cpu"
        small = _Small(
            serial=self._serial,
            step=self._train.global_steps,
            frame=frame,
            random=generators,
            python_random=random.getstate(),
            buffers=state.buffers() if rank == 0 else {},
            frozen_version=sum(
                state.params[s.index].version for s in state.layout.segments if not s.is_trainable
            ),
            done=None if is_here else torch.accelerator.current_stream(device).record_event(),
            is_read=threading.Event(),
        )
        self._under_way = self._queue.launch(partial(self._make, small), is_reduction=False)
        self._is_read = small.is_read

    def wait(self) -> None:
        """Wait for the snapshot under way, before states are written.

        Raises:
            CheckpointError: it failed.
            RuntimeError: a neighbour is gone.
        """
        work, self._under_way = self._under_way, None
        if work is not None:
            work.wait()

    @torch.no_grad()
    def _make(self, small: _Small) -> None:
        try:
            use_one_core()
            slot = self._slots[small.serial % 2]
            with stream_after(small.done, self._state.device):
                sent, marker = self._write(small, slot)
        finally:
            small.is_read.set()
        if self._ring is not None:
            self._ring.swap(slot, sent, marker)
        self._frozen_versions[small.serial % 2] = small.frozen_version

    def _write(self, small: _Small, slot: Slot) -> tuple[dict[str, int], bytes]:
        """Write this rank's files, and return those that are new and the marker."""
        state, tier, rank = self._state, self._state.tier, self._state.control.rank
        if self._num_made == 2:  # the first one is whole on all ranks
            self._drop_strangers()
        slot.invalidate(rank)
        names, written = list(tier.state_names()), {}
        for name in names:
            written[file_name(name, rank)] = slot.write(file_name(name, rank), self._parts(name))
        wholes: dict[str, Any] = {}
        if isinstance(tier, WholeTier):
            tensors: dict[str, Tensor] = {}
            wholes = whole_states(state, tier, tensors)
            file = file_name(WHOLE, rank)
            written[file] = slot.write(file, [Values(k, t) for k, t in tensors.items()])
        generators = [Values(key, tensor) for key, tensor in small.random.items()]
        written[file_name(RNG, rank)] = slot.write(file_name(RNG, rank), generators)
        if rank == 0:
            buffers = [Values(key, tensor) for key, tensor in small.buffers.items()]
            written[BUFFERS] = slot.write(BUFFERS, buffers)
        frozen = file_name(VALUE, rank)
        is_new = self._frozen_versions[small.serial % 2] != small.frozen_version
        size = slot.write(frozen, self._frozen()) if is_new else slot.size(frozen)
        sent = {**written, frozen: size} if is_new else dict(written)
        marker = seal(
            {
                "attempt": self._attempt,
                "serial": small.serial,
                "rank": rank,
                "world_size": state.control.world_size,
                "step": small.step,
                "states": names,
                "files": {**written, frozen: size},
                "row": [own_scalars(state), small.python_random, wholes],
                "frame": small.frame,
            }
        )
        slot.commit(rank, marker)
        return sent, marker

    def _parts(self, name: str) -> list[Values | Slice]:
        """Return this rank's slices of a state, as a save writes them."""
        state = self._state
        if name != MASTER and isinstance(state.tier, WholeTier):
            return [Values(k, t) for k, t in slices(state, state.tier, name).items()]
        is_on_host = state.device.type == "cpu"
        return [
            Slice(str(s.index), state.tier, name, *state.own_span(s.index), is_on_host)
            for s in state.layout.segments
            if s.is_trainable
        ]

    def _frozen(self) -> list[Values]:
        state = self._state
        frozen = (s.index for s in state.layout.segments if not s.is_trainable)
        return [Values(str(index), state.own_slice(index)) for index in frozen]

    def _drop_strangers(self) -> None:
        """Remove the files of ranks that are not here any more, on the first rank of a node."""
        rank, world_size = self._state.control.rank, self._state.control.world_size
        if rank % self._per_node or self._place is None:
            return
        here = range(rank, rank + self._per_node)
        copied = {(r - self._per_node) % world_size for r in here} if self._ring else set()
        drop_strangers(self._place.folder, {*here, *copied})

    # --------------------------------------------------------------- restoring

    def find(self, last_step: int | None) -> Snapshot | None:
        """Return the newest snapshot up to ``last_step`` that is whole over all ranks.

        Every rank must call it.
        """
        assert self._place is not None, "open() comes first"
        return find_newest(self._state, self._place.folder, last_step)

    def restore(self, snapshot: Snapshot) -> dict[str, Any]:
        """Restore a snapshot that `find` has found, and return the client state.

        Every rank must call it, where shards and states may be written.

        Raises:
            CheckpointError: it belongs to another model, or a rank failed.
        """
        assert self._place is not None, "open() comes first"
        state, control = self._state, self._state.control
        reader = open_snapshot(state, self._place.folder, snapshot)
        control.together("memory_checkpoint: check", lambda: check_fits(state, reader, self._train))
        client_state = restore_from(reader, state, self._train)
        self._restart()
        self._serial, self._is_continued = snapshot.serial, True
        return client_state

    def forget(self) -> None:
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


def make_memory_checkpoints(
    state: ShardedState,
    train: TrainState,
    settings: MemoryCheckpointConfig,
    ranks: Ranks,
    per_node: int,
) -> MemoryCheckpoints:
    """Return the snapshots that ``settings`` ask for. Every rank must call it.

    Raises:
        ConfigError: the ranks cannot send memory of the host to another node.
    """
    ring = None
    if settings.copies and per_node < ranks.size:
        if ranks.has_own_device and backend_on(ranks.group, torch.device("cpu")) is None:
            raise ConfigError(
                "memory_checkpoint.copies = 1 sends memory of the host between nodes: have the "
                'process group serve it by init_process_group("cpu:gloo,cuda:nccl"), or set '
                "memory_checkpoint.copies to 0"
            )
        ring = Ring(ranks.messages(), rank=ranks.rank, world_size=ranks.size, per_node=per_node)
    return MemoryCheckpoints(
        state, train, ring, every=settings.every, path=settings.path, per_node=per_node
    )
