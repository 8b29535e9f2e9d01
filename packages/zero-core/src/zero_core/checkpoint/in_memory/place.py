"""Folder in a host's memory that outlives a rank. See [Note: whose memory]."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero_core.checkpoint.in_memory import keeper
from zero_core.checkpoint.storage.location import Location
from zero_core.errors import CheckpointError, ConfigError

_BASE = Path("/dev/shm")
_KEEPER = ".keeper"
"""File on which the keeper holds a lock."""
_MARK = "TORCHELASTIC_RUN_ID"
"""Variable that torchrun gives to what it starts."""
_ERRORS = "TORCHELASTIC_ERROR_FILE"
"""Variable that torchrun gives to what it starts, with a path of each rank's own."""
_WAIT_S = 15.0
"""Longer than the workers of a data loader take to notice the end of their rank."""


class Place:
    """A rank's use of the folder, until `close` or the end of the process.

    Attributes:
        folder: of the copies that belong to one folder of checkpoints.
    """

    def __init__(self, path: str | None, directory: Location, rank: int) -> None:
        """Open the folder for the checkpoints of ``directory``.

        ``path``: given by the user, who removes it; None is the launcher's.

        Raises:
            CheckpointError: the folder cannot be made, or is in use for another engine.
        """
        self._locks: list[int] = []
        try:
            root = self._open_of_launcher() if path is None else Path(path)
            digest = hashlib.sha256(os.fsencode(str(directory.absolute()))).hexdigest()
            self.folder = root / digest[:16]
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_is_own(self.folder)
            self._lock(self.folder / f".rank-{rank:05d}.lock", directory)
        except OSError as error:
            raise CheckpointError(
                f"memory_checkpoint: no folder in memory: {error}; give one as "
                "memory_checkpoint.path"
            ) from error

    def _open_of_launcher(self) -> Path:
        launcher, user = find_launcher(), os.getuid()
        start = keeper.started_at(launcher)
        root = root_of(launcher, start)
        with _locked(_BASE / f"zero-core-{user}.lock"):
            _remove_stale(user)
            root.mkdir(mode=0o700, exist_ok=True)
            _check_is_own(root)
            self._locks.append(_open(root / keeper.USERS))
            fcntl.flock(self._locks[-1], fcntl.LOCK_SH)
            _start_keeper(root, launcher, start)
        return root

    def _lock(self, path: Path, directory: Location) -> None:
        """Refuse a second engine, which would write to the same files.

        A process that a rank has forked may hold the lock of the rank for a while after its end.
        """
        self._locks.append(_open(path))
        if not _has_lock(self._locks[-1]):
            gc.collect()  # of an engine that was dropped without close()
        limit = time.monotonic() + _WAIT_S
        while not _has_lock(self._locks[-1]):
            if time.monotonic() > limit:
                raise CheckpointError(
                    f"memory_checkpoint: another engine keeps copies for {directory}: resume() "
                    "each from a folder of its own, or close() the other one first"
                )
            time.sleep(0.1)

    def close(self) -> None:
        """Leave the folder to its keeper."""
        while self._locks:
            os.close(self._locks.pop())

    def __del__(self) -> None:
        self.close()


def check_launcher() -> None:
    """Refuse a program that nothing would start anew.

    Raises:
        ConfigError: with what to do.
    """
    if sys.platform != "linux" or _MARK not in os.environ:
        raise ConfigError(
            "memory_checkpoint: no launcher that would start this rank anew was found: start "
            "the ranks by torchrun or zero-engine on Linux, or give a folder in memory that "
            "outlives them as memory_checkpoint.path"
        )


def find_launcher() -> int:
    """Return the process that starts this rank anew.

    It is the nearest one above without this rank's variables: between them may be a shell, which
    ends with the rank. A launcher below another launcher has variables of the other one.
    """
    process = os.getppid()
    while process > 1 and _has_own_variables(process):
        fields = keeper.status(process)
        if not fields:  # it has just ended
            break
        process = int(fields[1])
    return process


def _has_own_variables(process: int) -> bool:
    """Whether a process has what the launcher gave to this rank."""
    own = {os.fsencode(f"{n}={os.environ[n]}") for n in (_MARK, _ERRORS) if n in os.environ}
    try:
        variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:  # another user's, or not Linux
        return False
    return bool(own) and own.issubset(variables)


def root_of(launcher: int, start: str) -> Path:
    """Return the folder of a launcher: its process and when that was started."""
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
    if found.st_uid != os.getuid() or not path.is_dir() or path.is_symlink():
        raise PermissionError(f"{path} belongs to another user")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _has_lock(descriptor: int) -> bool:
    """Try to take an exclusive lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_stale(user: int) -> None:
    """Remove the folders that no process uses any more."""
    for root in _BASE.glob(f"zero-core-{user}-*"):
        try:
            _check_is_own(root)
            users = _open(root / keeper.USERS)
        except OSError:  # another user's, or its keeper is removing it
            continue
        try:
            if _has_lock(users):
                shutil.rmtree(root, ignore_errors=True)
        finally:
            os.close(users)


def _start_keeper(root: Path, launcher: int, start: str) -> None:
    """Start the folder's keeper, if it has none. It inherits a lock that says so."""
    lock = _open(root / _KEEPER)
    try:
        if not _has_lock(lock):
            return
        os.set_inheritable(lock, True)
        streams = [(os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_RDWR, 0) for n in range(3)]
        program = [sys.executable, "-I", "-S", keeper.__file__, str(root), str(launcher), start]
        # A session of its own: what ends the launcher's processes does not end it.
        os.posix_spawn(
            sys.executable,
            [*program, str(lock)],
            os.environ,  # where Python finds its libraries
            file_actions=streams,
            setsid=True,
        )
    finally:
        os.close(lock)
