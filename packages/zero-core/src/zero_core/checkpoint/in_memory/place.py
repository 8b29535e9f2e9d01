"""Folder in a host's memory that outlives a rank, its two slots, and their exchange between nodes.

[Note: two slots]
Each rank keeps its slice of every state in files of a folder in memory, one file per state in the
form of a checkpoint's. Two slots take turns: one is written while the other is whole. A rank's
*marker* has all that is no tensor, and vouches for itself. It is removed before the rank's files
are overwritten, and renamed into place after them. A rank writes into a slot after an update, so
after the statistics of that step's gradient were summed over all ranks; and it waits for its last
copy before it adds to that sum. So the other slot is whole on every rank then, copies on other
nodes included.

Copies are made by a thread beside the next forward and backward, which do not write states. The
next update waits for it.

[Note: whose memory]
The folder is in ``/dev/shm``, named after the launcher (torchrun) that starts ranks anew. A process
of its own keeps it (`keeper`): that removes it when the launcher and all ranks have ended, whatever
killed them. What remains where the keeper was killed, too, is removed by the next job of the user
on the machine. Each rank also sends its slice to a rank of the next node, which keeps it beside its
own.

A folder belongs to one folder of checkpoints, so that engines that save apart are kept apart.
Data in memory has no checksums until a restart: a CRC-32 takes longer than the copy.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import mmap
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_core.checkpoint.in_memory import keeper
from zero_core.checkpoint.manifest import BUFFERS, is_sealed
from zero_core.checkpoint.safetensors_files import arrange, bytes_of
from zero_core.checkpoint.storage import Location, storing, write_all
from zero_core.comm.groups import Ranks
from zero_core.comm.p2p import wait_all
from zero_core.errors import CheckpointError, ConfigError
from zero_core.protocols import StateTier
from zero_core.sharded.snapshot import StateBlocks

_BASE = Path("/dev/shm")
# Variables that torchrun gives to what it starts, the latter with a path of each rank's own.
_MARK, _ERRORS = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"
_WAIT_S = 15.0  # longer than the workers of a data loader take to notice the end of their rank
_BLOCK_BYTES = 8 << 20  # of a message
_MAX_CARD_BYTES = 128 << 20
_OWNED = re.compile(r".+-([0-9]{5})\.(?:json|safetensors)")
_ADVICE = (
    "make the memory larger (a container's by --shm-size), give a folder in larger memory as "
    "memory_checkpoint.path, or leave memory_checkpoint out"
)


class Place:
    """A rank's use of the copies of a folder of checkpoints, until `close` or the process's end."""

    def __init__(self, path: str | None, directory: Location, rank: int) -> None:
        """Open ``folder`` for ``directory``: in the user's ``path``, or the launcher's."""
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
            gc.collect()  # of an engine that was dropped without close()
        # A process that a rank has forked may hold its lock for a while after the rank's end.
        limit = time.monotonic() + _WAIT_S
        while not _has_lock(self._locks[-1]):
            if time.monotonic() > limit:  # both would write to the same files
                raise CheckpointError(
                    f"memory_checkpoint: another engine keeps copies for {directory}: resume() "
                    "each from a folder of its own, or close() the other one first"
                )
            time.sleep(0.1)

    def _open_of_launcher(self) -> Path:
        launcher, user = find_launcher(), os.getuid()
        start = keeper.started_at(launcher)
        root = root_of(launcher, start)
        with ExitStack() as stack:
            lock = _open(_BASE / f"zero-core-{user}.lock")
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
            for other in _BASE.glob(f"zero-core-{user}-*"):  # those that no process uses any more
                with suppress(OSError):  # another user's, or its keeper is removing it
                    _check_is_own(other)
                    users = _open(other / keeper.USERS)
                    if _has_lock(users):
                        shutil.rmtree(other, ignore_errors=True)
                    os.close(users)
            root.mkdir(mode=0o700, exist_ok=True)
            _check_is_own(root)
            self._locks.append(_open(root / keeper.USERS))
            fcntl.flock(self._locks[-1], fcntl.LOCK_SH)
            kept = _open(root / ".keeper")  # the keeper inherits the lock, which says that it runs
            stack.callback(os.close, kept)
            if _has_lock(kept):
                program = [sys.executable, "-I", "-S", keeper.__file__]
                process = subprocess.Popen(
                    [*program, str(root), str(launcher), start],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[kept],
                    start_new_session=True,  # what ends the launcher's processes does not end it
                )
                process.returncode = 0  # nobody waits for it
        return root

    def close(self) -> None:
        while self._locks:
            os.close(self._locks.pop())

    __del__ = close


def check_launcher() -> None:
    """Refuse a program that nothing would start anew."""
    if sys.platform != "linux" or _MARK not in os.environ:
        raise ConfigError(
            "memory_checkpoint: no launcher that would start this rank anew was found: start "
            "the ranks by torchrun or zero-engine on Linux, or give a folder in memory that "
            "outlives them as memory_checkpoint.path"
        )


def find_launcher() -> int:
    """Return the process that starts this rank anew."""
    # It is the nearest one above without the variables that the launcher gave to this rank: between
    # them may be a shell. A launcher below another launcher has variables of the other one.
    own = {os.fsencode(f"{n}={os.environ[n]}") for n in (_MARK, _ERRORS) if n in os.environ}
    process = os.getppid()
    while own and process > 1:
        try:
            variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        except OSError:  # another user's, or not Linux
            break
        fields = keeper.status(process)
        if not own.issubset(variables) or not fields:  # without fields it has just ended
            break
        process = int(fields[1])
    return process


def root_of(launcher: int, start: str) -> Path:
    space = os.stat("/proc/self/ns/pid").st_ino  # containers may share the folder's memory
    name = f"{space} {launcher} {start}"
    return _BASE / f"zero-core-{os.getuid()}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _open(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if os.fstat(descriptor).st_uid != os.getuid():  # who could hold its lock for ever
        os.close(descriptor)
        raise PermissionError(f"{path} belongs to another user")
    return descriptor


def _check_is_own(path: Path) -> None:
    """Refuse a folder that another user has put there, or a link."""
    found = path.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{path} belongs to another user")


def _has_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def state_blocks(
    tier: StateTier, name: str, start: int, stop: int, block_numel: int
) -> StateBlocks:
    """Return elements ``[start, stop)`` of a state of ``tier``."""
    dtype = tier.read_state(name, start, min(start + 1, stop)).dtype
    starts = range(start, stop, block_numel)
    blocks = (tier.read_state(name, low, min(low + block_numel, stop)) for low in starts)
    return StateBlocks(dtype, (stop - start,), blocks)


class Slot:
    """A slot that this process writes.

    Its files are mapped: that takes half the time of writing to them. Memory is reserved before, as
    a write to a page for which there is none would end the process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Tensor] = {}  # bytes of those that were opened here, by name

    def write(self, name: str, tensors: Mapping[str, Tensor | StateBlocks]) -> int:
        """Write a safetensors file in place, and return its bytes."""
        header, size, blocks = arrange(tensors)
        into, stop = self.file(name, len(header) + size), len(header)
        into[:stop] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for block in blocks:
            start, stop = stop, stop + block.nbytes
            into[start:stop] = block.view(-1).view(torch.uint8)
        return into.numel()

    def file(self, name: str, size: int) -> Tensor:
        """Return the bytes of a file, as they are in memory. It gets ``size`` of them."""
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
        """Put the marker of a rank into place, once all its files are written."""
        aside = self.folder / f".{self._marker(rank).name}"
        aside.unlink(missing_ok=True)
        with storing(aside, _ADVICE), aside.open("xb", buffering=0) as file:
            write_all(file, marker)
        aside.rename(self._marker(rank))

    def _marker(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05d}.json"

    def read_markers(self) -> dict[int, dict[str, Any]]:
        """Return the markers, by rank, whose files are there in the size that they had."""
        found = {}
        for path in sorted(self.folder.glob("rank-?????.json")):
            with suppress(OSError):  # another rank writes it
                data = path.read_bytes()
                if is_sealed(data):
                    marker = json.loads(data)
                    sizes = {n: (self.folder / n).stat().st_size for n in marker["files"]}
                    if sizes == marker["files"]:
                        found[int(marker["rank"])] = marker
        return found


def drop_strangers(folder: Path, ranks: set[int]) -> None:
    """Remove the files of all but these ``ranks``."""
    for path in sorted(folder.glob("[01]/*")):
        match = _OWNED.fullmatch(path.name)
        owner = int(match[1]) if match else 0 if path.name == BUFFERS else -1
        if owner not in ranks:
            path.unlink(missing_ok=True)


class Ring:
    """Connections of a rank with ``target``, which keeps its copy, and ``source``, the reverse."""

    def __init__(self, ranks: Ranks, per_node: int) -> None:
        self.target = (ranks.rank + per_node) % ranks.size
        self.source = (ranks.rank - per_node) % ranks.size
        self._messages = ranks.messages()
        self._channel = self._messages.next_channel()

    def swap(self, slot: Slot, files: Mapping[str, int], marker: bytes) -> None:
        """Send ``files`` of ``slot`` and its marker, store the source's, on all ranks."""
        said = json.dumps([files, marker.decode()]).encode()
        card = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        size = torch.empty(1, dtype=torch.int64)
        self._exchange(torch.tensor([card.numel()]), size)
        if not 0 < int(size) <= _MAX_CARD_BYTES:
            raise RuntimeError(f"rank {self.source} announces {int(size)} bytes about its copy")
        received = torch.empty(int(size), dtype=torch.uint8)
        self._exchange(card, received)
        their_files, their_marker = json.loads(bytes(bytes_of(received)))
        for name, nbytes in their_files.items():
            if not (name == BUFFERS or _OWNED.fullmatch(name)) or "/" in name or nbytes < 0:
                raise CheckpointError(
                    f"a peer sends the file {name!r:.80} of {nbytes} bytes: no copy has it"
                )
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
    """Yield the bytes of each message, where they are in memory."""
    for name, size in files.items():
        data = slot.file(name, size)
        for start in range(0, size, _BLOCK_BYTES):
            yield data[start : start + _BLOCK_BYTES]
