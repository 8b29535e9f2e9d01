"""Snapshots of a rank's states in host memory, made during the next step, for a lossless restart.

[Note: two slots]
Each rank writes its slice of every state to files of a folder in memory, one file per state, as in
a checkpoint. Two slots are written alternately, so that one stays complete. A rank's *marker*
has all data other than tensors, and a digest of itself. The marker is removed before the rank's
files are overwritten. A new one is renamed into place afterwards. All ranks exchange gradient
statistics before an update, and a rank enters this exchange only after its last snapshot is
complete. When a rank writes a slot after an update, the other slot is therefore complete on every
rank, including its copies on other nodes.

A thread makes the snapshot during the next forward and backward, which do not write states. The
next update waits for the thread. The markers of all ranks form a manifest: files are restored like
those on a disk, at any stage and number of ranks. A rank that lacks files (on a new node) receives
them from a rank that has them.

[Note: whose memory]
Without a configured path, the folder is in ``/dev/shm``, named after the launcher (torchrun) that
restarts ranks. A separate process (`keeper`) removes the folder when the launcher and all ranks
have ended, for any reason. If the keeper was killed, too, the user's next such job on the machine
removes the folder. A rank's copy on another node is in the folder of that node's ranks.

Each folder of checkpoints has its own folder in memory, so engines with separate checkpoints do not
mix. Files in memory have no checksums until a restart, because a CRC-32 takes longer than the copy.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import mmap
import os
import random
import re
import shutil
import stat
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_core._libc import use_one_core
from zero_core.checkpoint import save
from zero_core.checkpoint.files import Reader, crc_of, newest_step
from zero_core.checkpoint.in_memory import keeper
from zero_core.checkpoint.json_values import encode
from zero_core.checkpoint.load import check_fits, restore_from
from zero_core.checkpoint.manifest import (
    BUFFERS,
    RNG,
    VALUE,
    WHOLE,
    file_name,
    fill,
    frame_of,
    is_sealed,
    parse,
    seal,
)
from zero_core.checkpoint.safetensors_files import CHUNK_BYTES, arrange, bytes_of
from zero_core.checkpoint.storage import Location, open_regular, size_of, storing, write_all
from zero_core.comm.control import PIECE_BYTES
from zero_core.comm.groups import Ranks, backend_on
from zero_core.comm.p2p import wait_all
from zero_core.comm.queues import HostQueues
from zero_core.config import MemoryCheckpointConfig
from zero_core.core.extension import EndedStep, Extension
from zero_core.errors import CheckpointError, ConfigError
from zero_core.optim.train_state import TrainState
from zero_core.protocols import Work
from zero_core.sharded.sharded_state import ShardedState
from zero_core.sharded.snapshot import Snapshot, StateBlocks, stream_after

_BASE = Path("/dev/shm")
_WAIT_S = 15.0  # longer than data-loader workers take to notice the end of their rank
_BLOCK_BYTES = 8 << 20  # bytes of one message
_OWNED = re.compile(r".+-([0-9]{5})\.(?:json|safetensors)")
_ADVICE = (
    "make the memory larger (a container's by --shm-size), give a folder in larger memory as "
    "memory_checkpoint.path, or leave memory_checkpoint out"
)


class Place:
    """A rank's lock on the folder in memory that belongs to a folder of checkpoints."""

    def __init__(self, path: str | None, directory: Location, rank: int) -> None:
        """Open and lock the folder for ``directory``, within ``path`` or the launcher's folder."""
        self._locks: list[int] = []
        try:
            root = self._open_of_launcher() if path is None else Path(path)
            digest = hashlib.sha256(os.fsencode(str(directory.absolute()))).hexdigest()
            self.folder = root / digest[:16]
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_is_own(self.folder)
            self._locks.append(_open(self.folder / f".rank-{rank:05d}.lock"))
        except OSError as error:
            raise CheckpointError(
                f"memory_checkpoint: no folder in memory: {error}; give one as "
                "memory_checkpoint.path"
            ) from error
        if not _has_lock(self._locks[-1]):
            gc.collect()  # an engine that was dropped without close() may have the lock
        # A process forked by a rank may hold the rank's lock for a while after the rank has ended.
        limit = time.monotonic() + _WAIT_S
        while not _has_lock(self._locks[-1]):
            if time.monotonic() > limit:  # two engines would write to the same files
                raise CheckpointError(
                    f"memory_checkpoint: another engine keeps copies for {directory}: resume() "
                    "each from a folder of its own, or close() the other one first"
                )
            time.sleep(0.1)

    def _open_of_launcher(self) -> Path:
        launcher, user = keeper.find_launcher(), os.getuid()
        start = keeper.started_at(launcher)
        root = root_of(launcher, start)
        with ExitStack() as stack:
            lock = _open(_BASE / f"zero-core-{user}.lock")
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
            for other in _BASE.glob(f"zero-core-{user}-*"):  # remove folders without users
                with suppress(OSError):  # another user's folder, or its keeper is removing it
                    _check_is_own(other)
                    users = _open(other / keeper.USERS)
                    if _has_lock(users):
                        shutil.rmtree(other, ignore_errors=True)
                    os.close(users)
            root.mkdir(mode=0o700, exist_ok=True)
            _check_is_own(root)
            self._locks.append(_open(root / keeper.USERS))
            fcntl.flock(self._locks[-1], fcntl.LOCK_SH)
            kept = _open(root / ".keeper")  # the keeper inherits this lock and holds it
            stack.callback(os.close, kept)
            if _has_lock(kept):
                program = [sys.executable, "-I", "-S", keeper.__file__]
                process = subprocess.Popen(
                    [*program, str(root), str(launcher), start],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[kept],
                    start_new_session=True,  # signals to the launcher's group do not end the keeper
                )
                process.returncode = 0  # avoids Popen's warning about a running child
        return root

    def close(self) -> None:
        while self._locks:
            os.close(self._locks.pop())

    __del__ = close


def root_of(launcher: int, start: str) -> Path:
    space = os.stat("/proc/self/ns/pid").st_ino  # containers may share ``/dev/shm``
    name = f"{space} {launcher} {start}"
    return _BASE / f"zero-core-{os.getuid()}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _open(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if os.fstat(descriptor).st_uid != os.getuid():  # another user could keep the lock forever
        os.close(descriptor)
        raise PermissionError(f"{path} belongs to another user")
    return descriptor


def _check_is_own(path: Path) -> None:
    found = path.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{path} belongs to another user")


def _has_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Slot:
    """A slot in ``folder``: see [Note: two slots].

    Files are written through mappings, which takes half the time of ``os.write``. Their memory is
    reserved first, because a write to a page without memory would kill the process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Tensor] = {}  # mapped bytes of opened files, by name

    def write(self, name: str, tensors: Mapping[str, Tensor | StateBlocks]) -> int:
        """Write a safetensors file in place, and return its size in bytes."""
        header, size, blocks = arrange(tensors)
        into, stop = self.file(name, len(header) + size), len(header)
        into[:stop] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for block in blocks:
            start, stop = stop, stop + block.nbytes
            into[start:stop] = block.view(-1).view(torch.uint8)
        return into.numel()

    def file(self, name: str, size: int) -> Tensor:
        found = self.files.get(name)
        if found is None or found.numel() != size:
            with storing(self.folder / name, _ADVICE):
                self.folder.mkdir(mode=0o700, exist_ok=True)
                descriptor = _open(self.folder / name)
                try:
                    os.posix_fallocate(descriptor, 0, size)
                    os.ftruncate(descriptor, size)
                    mapped = mmap.mmap(descriptor, size)
                finally:
                    os.close(descriptor)
            found = self.files[name] = torch.frombuffer(mapped, dtype=torch.uint8)
        return found

    def invalidate(self, rank: int) -> None:
        self._marker(rank).unlink(missing_ok=True)

    def commit(self, rank: int, marker: bytes) -> None:
        """Write a rank's marker. Call it after all files of the rank are written."""
        aside = self.folder / f".{self._marker(rank).name}"
        aside.unlink(missing_ok=True)
        with storing(aside, _ADVICE), aside.open("xb", buffering=0) as file:
            write_all(file, marker)
        aside.rename(self._marker(rank))

    def _marker(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05d}.json"

    def read_markers(self) -> dict[int, dict[str, Any]]:
        """Return the intact markers, by rank, whose files exist and have the recorded sizes."""
        found = {}
        for path in sorted(self.folder.glob("rank-?????.json")):
            with suppress(OSError):  # another rank may be replacing the files
                data = path.read_bytes()
                if is_sealed(data):
                    marker = json.loads(data)
                    sizes = {n: (self.folder / n).stat().st_size for n in marker["files"]}
                    if sizes == marker["files"]:
                        found[int(marker["rank"])] = marker
        return found


class Ring:
    """Exchange of snapshots between nodes: to rank ``target``, and from rank ``source``."""

    def __init__(self, ranks: Ranks, per_node: int) -> None:
        self.target = (ranks.rank + per_node) % ranks.size
        self.source = (ranks.rank - per_node) % ranks.size
        self._messages = ranks.messages()
        self._channel = self._messages.next_channel()

    def swap(self, slot: Slot, files: Mapping[str, int], marker: bytes) -> None:
        """Send files and marker to `target`, store those of `source`. Every rank must call it."""
        said = json.dumps([files, marker.decode()]).encode()
        card = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        size = torch.empty(1, dtype=torch.int64)
        self._exchange(torch.tensor([card.numel()]), size)
        received = torch.empty(int(size), dtype=torch.uint8)
        self._exchange(card, received)
        their_files, their_marker = json.loads(bytes(bytes_of(received)))
        slot.invalidate(self.source)
        for out, into in zip_longest(_blocks(slot, files), _blocks(slot, their_files)):
            self._exchange(out, into)
        slot.commit(self.source, their_marker.encode())

    def _exchange(self, given: Tensor | None, into: Tensor | None) -> None:
        works = []
        if into is not None:
            works.append(self._messages.irecv(into, self.source, self._channel))
        if given is not None:
            works.append(self._messages.isend(given, self.target, self._channel))
        wait_all(works)


def _blocks(slot: Slot, files: Mapping[str, int]) -> Iterator[Tensor]:
    for name, size in files.items():
        data = slot.file(name, size)
        for start in range(0, size, _BLOCK_BYTES):
            yield data[start : start + _BLOCK_BYTES]


class MemoryCheckpoints(Extension):
    """In-memory snapshots of one engine, which are made after steps and restored at a restart."""

    def __init__(
        self,
        state: ShardedState,
        train: TrainState,
        settings: MemoryCheckpointConfig,
        ranks: Ranks,
        per_node: int,
    ) -> None:
        """Every rank must create the extension. `newer_state` opens the folder."""
        self._ring: Ring | None = None  # None without copies on other nodes
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
        self._is_read = threading.Event()  # set when the pending snapshot has read all states
        self._is_read.set()
        self._place: Place | None = None
        self._slots: list[Slot] = []
        self._serial = 0
        self._restart()

    def _restart(self) -> None:
        self._num_made = 0
        self._attempt = ""  # identity of this run of the ranks, set at the first snapshot
        self._is_continued = False  # whether the states were restored from a snapshot
        self._frozen_versions = [-1, -1]  # version of the frozen values in each slot

    def _drop_others(self) -> None:
        for slot in self._slots:
            for rank, marker in slot.read_markers().items():
                if marker["attempt"] != self._attempt:
                    slot.invalidate(rank)

    def before_update(self, number: int) -> None:
        """Wait for the pending snapshot, because the update writes states."""
        if self._place is None:
            raise RuntimeError(
                "memory_checkpoint keeps copies for engine.resume(directory): call it after "
                "build(), before the first step"
            )
        self.before_write()

    def stepped(self, ended: EndedStep) -> None:
        """Start a snapshot if one is due."""
        if ended.number % self._settings.every:
            return
        state = self._state
        if not self._attempt:
            self._attempt = state.control.gather_json(uuid.uuid4().hex)[0]
            if not self._is_continued:
                self._drop_others()
        self._serial += 1
        self._num_made += 1
        content = {
            "progress": encode(self._train.state_dict(), "progress"),
            "client_state": encode(ended.client_state, "client_state"),
        }
        rank, device = state.control.rank, state.device
        tensors = save.small_files(state)
        for name in state.extension_states():
            tensors[file_name(name, rank)] = save.own_slices(state, name)
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
        """Write a snapshot, and send it to the next node if there is a `Ring`.

        ``tensors`` are copies of buffers and states of generators and extensions, by file. ``done``
        marks the end of the update on the device. ``is_read`` is set after the reads or an error.
        """
        number, rank = facts["serial"] % 2, facts["rank"]
        state, tier, slot = self._state, self._state.tier, self._slots[number]
        try:
            use_one_core()
            with stream_after(done, state.device):
                # All ranks have a complete snapshot, so files of other nodes' ranks are obsolete.
                if self._num_made == 2 and rank % self._per_node == 0:
                    kept = set(range(rank, rank + self._per_node))
                    if self._ring is not None:
                        kept |= {(r - self._per_node) % facts["world_size"] for r in kept}
                    for path in sorted(slot.folder.parent.glob("[01]/*")):
                        match = _OWNED.fullmatch(path.name)
                        owner = int(match[1]) if match else 0 if path.name == BUFFERS else -1
                        if owner not in kept:
                            path.unlink(missing_ok=True)
                slot.invalidate(rank)
                names, written = list(tier.state_names()), {}
                # On a CPU, small blocks stay in the cache until they are written.
                numel = 1 << 18 if state.device.type == "cpu" else 1 << 23
                snapshot = Snapshot(state, None, block_numel=numel)
                for name in names:
                    file = file_name(name, rank)
                    written[file] = slot.write(file, save.tier_slices(state, name, snapshot))
                wholes, of_wholes = save.whole_states(state)
                for file, values in (tensors | of_wholes).items():
                    written[file] = slot.write(file, values)
                sent, frozen = dict(written), file_name(VALUE, rank)
                if self._frozen_versions[number] != frozen_version:
                    sent[frozen] = slot.write(frozen, save.own_slices(state, VALUE))
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
        """Open the folder for ``directory``. Return a function that restores its newest snapshot.

        Returns None if no complete snapshot up to rank 0's ``last_step`` is at least as new as the
        newest checkpoint in ``directory``. Every rank must call it.
        """
        self.remove()
        control, path = self._state.control, self._settings.path
        if path is None and (sys.platform != "linux" or keeper.MARK not in os.environ):
            raise ConfigError(
                "memory_checkpoint: no launcher that would start this rank anew was found: start "
                "the ranks by torchrun or zero-engine on Linux, or give a folder in memory that "
                "outlives them as memory_checkpoint.path"
            )
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
        lasts, rows = zip(*control.gather_json([last_step, own]), strict=True)
        holders: dict[tuple[int, str, int, int], dict[int, int]] = {}
        for holder, row in enumerate(rows):
            for serial, attempt, step, world_size, rank in row:
                if lasts[0] is None or step <= lasts[0]:
                    key = (serial, attempt, step, world_size)
                    holders.setdefault(key, {}).setdefault(rank, holder)
        whole = [key for key, found in holders.items() if found.keys() == set(range(key[-1]))]
        saved = control.gather_json(newest_step(directory))
        if not whole:
            return None
        serial, attempt, step, world_size = newest = max(whole)
        if step < max(saved):
            return None
        return partial(self._restore, serial, attempt, holders[newest])

    def _restore(self, serial: int, attempt: str, holders: dict[int, int]) -> dict[str, Any]:
        """Restore a snapshot. Every rank must call it.

        ``holders`` maps each rank that wrote files to the lowest rank that can read these files.
        """
        state, control = self._state, self._state.control
        place = self._slots[serial % 2].folder
        here = {
            rank: marker
            for rank, marker in Slot(place).read_markers().items()
            if (marker["serial"], marker["attempt"]) == (serial, attempt)
        }
        own = {r: here[r] for r, holder in sorted(holders.items()) if holder == control.rank}
        markers = _merged(control.gather_json(own))
        names = list(
            dict.fromkeys(name for rank in sorted(markers) for name in markers[rank]["states"])
        )
        frame = markers[0]["frame"]
        measured = control.together(
            "memory_checkpoint: read",
            lambda: {rank: _measure(place, rank, m, names, frame) for rank, m in own.items()},
        )
        facts = _merged(control.gather_json(measured))
        rows = [[facts[rank], *markers[rank]["row"]] for rank in sorted(markers)]
        content = {**fill(frame, rows, names), "has_frozen": True}
        reader = Reader(place, parse(seal(content), f"the copies in memory ({place})"))
        owners = {name: rank for rank in facts for name in facts[rank]}
        lacking = [n for n in sorted(_needed(state, reader)) if owners[n] not in here]
        sources = {name: holders[rank] for name, rank in owners.items()}
        self._fetch(place, lacking, sources, reader)
        received = [chunk for chunk in reader.chunks() if chunk[0] in set(lacking)]
        control.together("memory_checkpoint: verify", lambda: reader.check(received))
        control.together("memory_checkpoint: check", lambda: check_fits(state, reader, self._train))
        client_state = restore_from(reader, state, self._train)
        self._restart()
        self._serial, self._is_continued = serial, True
        return client_state

    def _fetch(
        self, place: Path, lacking: Sequence[str], sources: Mapping[str, int], reader: Reader
    ) -> None:
        """Receive the files in ``lacking`` from ranks that have them. Every rank must call it.

        This is a separate method so that its buffers and mappings are freed before the restore.
        """
        state, control = self._state, self._state.control
        fetched = Slot(place)
        for name in sorted({name for row in control.gather_json(lacking) for name in row}):
            source, size = sources[name], reader.manifest.files[name].bytes
            path, aside = place / name, place / f".{name}.{control.rank}"
            for start in range(0, size, PIECE_BYTES):
                piece = torch.empty(min(PIECE_BYTES, size - start), dtype=torch.uint8)
                if source == control.rank:
                    with open_regular(path, follows_links=False) as file:
                        file.seek(start)
                        data = bytearray(file.read(piece.numel()))
                    piece = torch.frombuffer(data, dtype=torch.uint8)
                piece = piece.to(state.device)
                control.broadcast(piece, source=source)
                if name in lacking:
                    fetched.file(aside.name, size)[start : start + piece.numel()] = piece.cpu()
            if name in lacking:
                aside.replace(path)

    def loaded(self, folder: str, seconds: float) -> None:
        """Invalidate all snapshots, because states were loaded from a checkpoint."""
        if self._place is not None:
            self._restart()
            self._drop_others()

    def remove(self) -> None:
        """Stop on this rank only, and keep the snapshots for a restart.

        Waits until a pending snapshot has read the states, but not for its transfer to other nodes.
        """
        self._is_read.wait()
        work, place = self._under_way, self._place
        self._under_way, self._place, self._slots = None, None, []
        if place is None:
            return
        if work is None:
            place.close()
        else:  # close after the snapshot, which may still write another node's copy to the folder
            self._queue.launch(place.close, is_reduction=False)


def _merged(rows: Iterable[dict[str, Any]]) -> dict[int, Any]:
    return {int(rank): value for row in rows for rank, value in row.items()}


def _measure(
    place: Path, rank: int, marker: Mapping[str, Any], names: list[str], frame: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return size and checksums of a rank's files. Writes zeros for ``names`` that it lacks."""
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
