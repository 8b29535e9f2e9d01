"""Snapshots of a rank's state in memory, made beside the next step. See [Note: two slots].

The markers of all ranks make a manifest, and the files are those of a checkpoint: they are restored
as from a disk, at any stage and number of ranks. A rank that lacks a file, on a node that is new,
gets it from one that has it.
"""

from __future__ import annotations

import json
import random
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_core._libc import use_one_core
from zero_core.checkpoint import save
from zero_core.checkpoint.files import Reader, crc_of, newest_step
from zero_core.checkpoint.in_memory import place as memory
from zero_core.checkpoint.in_memory.place import Place, Ring, Slot, state_blocks
from zero_core.checkpoint.json_values import encode
from zero_core.checkpoint.load import check_fits, restore_from
from zero_core.checkpoint.manifest import (
    BUFFERS,
    CHUNK_BYTES,
    RNG,
    VALUE,
    WHOLE,
    file_name,
    fill,
    frame_of,
    parse,
    seal,
)
from zero_core.checkpoint.storage import Location, open_regular, size_of
from zero_core.comm.control import PIECE_BYTES
from zero_core.comm.groups import Ranks, backend_on
from zero_core.comm.queues import HostQueues
from zero_core.config import MemoryCheckpointConfig
from zero_core.core.extension import EndedStep, Extension
from zero_core.errors import ConfigError
from zero_core.optim.train_state import TrainState
from zero_core.optim.whole_tier import WholeTier
from zero_core.protocols import Work
from zero_core.sharded.sharded_state import MASTER, ShardedState
from zero_core.sharded.snapshot import StateBlocks, stream_after


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
        """Prepare. `newer_state` opens the folder. Every rank must call it."""
        self._ring: Ring | None = None  # sends copies to the next node
        if settings.copies and per_node < ranks.size:
            if ranks.has_own_device and backend_on(ranks.group, torch.device("cpu")) is None:
                raise ConfigError(
                    "memory_checkpoint.copies = 1 sends memory of the host between nodes: have the "
                    'process group serve it by init_process_group("cpu:gloo,cuda:nccl"), or set '
                    "memory_checkpoint.copies to 0"
                )
            self._ring = Ring(ranks, per_node)
        self._state = state
        self._train = train
        self._settings = settings
        self._per_node = per_node
        self._queue = HostQueues()
        self._under_way: Work | None = None
        self._is_read = threading.Event()  # of the last snapshot
        self._is_read.set()
        self._place: Place | None = None
        self._slots: list[Slot] = []
        self._serial = 0
        self._restart()

    def _restart(self) -> None:
        self._num_made = 0
        self._attempt = ""  # of the launcher to start this rank, set at the first snapshot
        self._is_continued = False  # the snapshot that was restored is still needed
        self._frozen_versions = [-1, -1]  # in each slot

    def _drop_others(self) -> None:
        """Remove the markers that this attempt did not write."""
        for slot in self._slots:
            for rank, marker in slot.read_markers().items():
                if marker["attempt"] != self._attempt:
                    slot.invalidate(rank)

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
        if ended.number % self._settings.every:
            return
        state = self._state
        if not self._attempt:
            token = uuid.uuid4().hex
            self._attempt = state.control.gather_bytes(token.encode())[0].decode()
            if not self._is_continued:
                self._drop_others()
        self._serial += 1
        self._num_made += 1
        content = {
            "progress": encode(self._train.state_dict(), "progress"),
            "client_state": encode(ended.client_state, "client_state"),
        }
        rank, device = state.control.rank, state.device
        tensors = {file_name(RNG, rank): save.random_states()}
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

        ``tensors`` are copies of what the next forward changes, by file. ``done``: the update has
        ended on the device. ``is_read``: this rank has read its states, or failed to.
        """
        number, rank = facts["serial"] % 2, facts["rank"]
        state, tier, slot = self._state, self._state.tier, self._slots[number]
        try:
            use_one_core()
            with stream_after(done, state.device):
                # The first one is whole on all ranks: files of ranks that are gone are not needed.
                if self._num_made == 2 and rank % self._per_node == 0:
                    kept = set(range(rank, rank + self._per_node))
                    if self._ring is not None:
                        kept |= {(r - self._per_node) % facts["world_size"] for r in kept}
                    memory.drop_strangers(slot.folder.parent, kept)
                slot.invalidate(rank)
                names, written = list(tier.state_names()), {}
                for name in names:  # as a save writes them, one at a time
                    parts: Mapping[str, Tensor | StateBlocks]
                    if name != MASTER and isinstance(tier, WholeTier):
                        parts = save.slices(state, tier, name)
                    else:
                        # On a CPU few elements, which stay in its cache until they are written.
                        block_numel = 1 << 18 if state.device.type == "cpu" else 1 << 23
                        parts = {
                            str(s.index): state_blocks(
                                tier, name, *state.own_span(s.index), block_numel
                            )
                            for s in state.layout.segments
                            if s.is_trainable
                        }
                    written[file_name(name, rank)] = slot.write(file_name(name, rank), parts)
                wholes: dict[str, Any] = {}
                if isinstance(tier, WholeTier):
                    into = tensors.setdefault(file_name(WHOLE, rank), {})
                    wholes = save.whole_states(state, tier, into)
                written |= {file: slot.write(file, values) for file, values in tensors.items()}
                sent, frozen = dict(written), file_name(VALUE, rank)
                if self._frozen_versions[number] != frozen_version:
                    sent[frozen] = slot.write(frozen, save.frozen_slices(state))
                written[frozen] = slot.files[frozen].numel()
                names += state.extension_states()
                row = [save.own_scalars(state), python_random, wholes]
                marker = seal({**facts, "states": names, "files": written, "row": row})
                slot.commit(rank, marker)
        finally:
            is_read.set()
        if self._ring is not None:
            self._ring.swap(slot, sent, marker)
        self._frozen_versions[number] = frozen_version

    def newer_state(
        self, directory: Location, last_step: int | None
    ) -> Callable[[], dict[str, Any]] | None:
        """Open the folder for ``directory``. Return what restores the newest whole snapshot."""
        self.remove()
        control, path = self._state.control, self._settings.path
        if path is None:
            memory.check_launcher()
        place = control.together(
            "memory_checkpoint: open", lambda: Place(path, directory, control.rank)
        )
        self._place, self._slots = place, [Slot(place.folder / number) for number in ("0", "1")]
        self._restart()
        own = [
            [m["serial"], m["attempt"], m["step"], m["world_size"], rank]
            for slot in self._slots
            for rank, m in slot.read_markers().items()
        ]
        cards = control.gather_bytes(json.dumps([last_step, own]).encode())
        lasts, rows = zip(*map(json.loads, cards), strict=True)
        holders: dict[tuple[int, str, int, int], dict[int, int]] = {}
        for holder, row in enumerate(rows):
            for serial, attempt, step, world_size, rank in row:
                if lasts[0] is None or step <= lasts[0]:  # rank 0's counts
                    key = (serial, attempt, step, world_size)
                    holders.setdefault(key, {}).setdefault(rank, holder)
        whole = [key for key, found in holders.items() if found.keys() == set(range(key[-1]))]
        saved = control.gather_bytes(str(newest_step(directory)).encode())
        if not whole:
            return None
        serial, attempt, step, world_size = newest = max(whole)
        if step < max(map(int, saved)):
            return None
        return partial(self._restore, serial, attempt, holders[newest])

    def _restore(self, serial: int, attempt: str, holders: dict[int, int]) -> dict[str, Any]:
        """Restore a snapshot that is whole over all ranks. Every rank must call it.

        ``holders``: of each writing rank's files, the lowest rank here whose host has it.
        """
        state, control = self._state, self._state.control
        slot = self._slots[serial % 2]
        place = slot.folder
        here = {
            rank: marker
            for rank, marker in slot.read_markers().items()
            if (marker["serial"], marker["attempt"]) == (serial, attempt)
        }
        own = {r: here[r] for r, holder in sorted(holders.items()) if holder == control.rank}
        markers = _merged(control.gather_bytes(json.dumps(own).encode()))
        names = list(
            dict.fromkeys(name for rank in sorted(markers) for name in markers[rank]["states"])
        )
        frame = markers[0]["frame"]
        measured = control.together(
            "memory_checkpoint: read",
            lambda: {rank: _measure(place, rank, m, names, frame) for rank, m in own.items()},
        )
        facts = _merged(control.gather_bytes(json.dumps(measured).encode()))
        rows = [[facts[rank], *markers[rank]["row"]] for rank in sorted(markers)]
        content = {**fill(frame, rows, names), "has_frozen": True}
        reader = Reader(place, parse(seal(content), f"the copies in memory ({place})"))
        owners = {name: rank for rank in facts for name in facts[rank]}
        lacking = [n for n in sorted(_needed(state, reader)) if owners[n] not in here]
        _fetch(state, reader, place, lacking, {n: holders[owners[n]] for n in owners})
        control.together("memory_checkpoint: check", lambda: check_fits(state, reader, self._train))
        client_state = restore_from(reader, state, self._train)
        self._restart()
        self._serial, self._is_continued = serial, True
        return client_state

    def loaded(self, folder: str, seconds: float) -> None:
        """Let the next snapshot replace all others: the states were loaded from elsewhere."""
        if self._place is not None:
            self._restart()
            self._drop_others()

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


def _merged(rows: Iterable[bytes]) -> dict[int, Any]:
    return {int(rank): value for row in rows for rank, value in json.loads(row).items()}


def _measure(
    place: Path, rank: int, marker: Mapping[str, Any], names: list[str], frame: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return size and checksums of a rank's files, and write zeros for states it did not know."""
    dtypes = {param["name"]: param["dtype"] for param in frame["params"]}
    slot = Slot(place)
    for name in [name for name in names if name not in marker["states"]]:
        zeros = {}
        for index, segment in enumerate(frame["segments"]):
            if segment["is_trainable"]:
                is_wide = any(dtypes[param] == "float64" for param, _, _ in segment["slots"])
                dtype = torch.float64 if is_wide else torch.float32
                zeros[str(index)] = torch.zeros(segment["shard_numel"], dtype=dtype)
        slot.write(file_name(name, rank), zeros)
    found = {}
    for file in dict.fromkeys((*marker["files"], *(file_name(name, rank) for name in names))):
        with open_regular(place / file, follows_links=False) as opened:
            size = size_of(opened)
            starts = range(0, max(size, 1), CHUNK_BYTES)
            crcs = [crc_of(opened, min(CHUNK_BYTES, size - s), place / file) for s in starts]
            found[file] = {"bytes": size, "crc32": crcs}
    return found


def _needed(state: ShardedState, reader: Reader) -> set[str]:
    """Return the files that this rank restores from."""
    manifest = reader.manifest
    is_trained = {param.name: param.is_trainable for param in manifest.params}
    found = {BUFFERS}
    if manifest.world_size == state.control.world_size:
        found.add(file_name(RNG, state.control.rank))
    for _, spec, low, high in state.value_parts():
        span = (low, high) if reader.has_order_of(spec) else (0, spec.numel)
        for kind in manifest.states if is_trained[spec.name] else (VALUE,):
            found |= {file_name(kind, rank) for rank in reader.ranks_of(spec.name, *span)}
    if manifest.whole_states:
        found |= {name for name in manifest.files if name.startswith(WHOLE)}
    return found


def _fetch(
    state: ShardedState, reader: Reader, place: Path, lacking: list[str], sources: Mapping[str, int]
) -> None:
    """Have every rank get the files of ``place`` that it lacks from ranks that have them."""
    control, slot = state.control, Slot(place)
    asked = [json.loads(row) for row in control.gather_bytes(json.dumps(lacking).encode())]
    for name in sorted({name for row in asked for name in row}):
        size = reader.manifest.files[name].bytes
        path, aside = place / name, place / f".{name}.{control.rank}"
        for start in range(0, size, PIECE_BYTES):
            piece = torch.empty(min(PIECE_BYTES, size - start), dtype=torch.uint8)
            if sources[name] == control.rank:
                with open_regular(path, follows_links=False) as file:
                    file.seek(start)
                    piece = torch.frombuffer(bytearray(file.read(piece.numel())), dtype=torch.uint8)
            piece = piece.to(state.device)
            control.broadcast(piece, source=sources[name])
            if name in lacking:
                slot.file(aside.name, size)[start : start + piece.numel()] = piece.cpu()
        if name in lacking:
            aside.replace(path)
    control.together(
        "memory_checkpoint: verify",
        lambda: reader.check(chunk for chunk in reader.chunks() if chunk[0] in set(lacking)),
    )
