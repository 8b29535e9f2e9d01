"""Folder in a host's memory that outlives a rank. See [Note: whose memory]."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero_core.checkpoint.in_memory import keeper
from zero_core.errors import CheckpointError, ConfigError

_BASE = Path("/dev/shm")
_KEEPER = ".keeper"
"""File on which the keeper holds a lock."""


class Place:
    """A rank's use of the folder, until `close` or the end of the process.

    Attributes:
        folder: of the copies that belong to one folder of checkpoints.
    """

    def __init__(self, path: str | None, directory: Path) -> None:
        """Open the folder for the checkpoints of ``directory``.

        ``path``: given by the user, who removes it; None is the launcher's.

        Raises:
            ConfigError: nothing here outlives a rank.
            CheckpointError: the folder cannot be made.
        """
        self._users: int | None = None
        try:
            root = self._open_of_launcher() if path is None else Path(path)
            digest = hashlib.sha256(os.fsencode(directory.absolute())).hexdigest()
            self.folder = root / digest[:16]
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"memory_checkpoint: no folder in memory: {error}; give one as "
                "memory_checkpoint.path"
            ) from error

    def _open_of_launcher(self) -> Path:
        launcher = os.getppid()
        if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
            raise ConfigError(
                "memory_checkpoint: no launcher that would start this rank anew was found: start "
                "the ranks by torchrun or zero-engine on Linux, or give a folder in memory that "
                "outlives them as memory_checkpoint.path"
            )
        start, user = keeper.started_at(launcher), os.getuid()
        root = root_of(launcher, start)
        with _locked(_BASE / f"zero-core-{user}.lock"):
            _remove_stale(user)
            root.mkdir(mode=0o700, exist_ok=True)
            _check_is_own(root)
            self._users = _open(root / keeper.USERS)
            fcntl.flock(self._users, fcntl.LOCK_SH)
            _start_keeper(root, launcher, start)
        return root

    def close(self) -> None:
        """Leave the folder to its keeper."""
        if self._users is not None:
            os.close(self._users)
            self._users = None

    def __del__(self) -> None:
        self.close()


def root_of(launcher: int, start: str) -> Path:
    """Return the folder of a launcher: its process and when that was started."""
    digest = hashlib.sha256(f"{launcher} {start}".encode()).hexdigest()
    return _BASE / f"zero-core-{os.getuid()}-{digest[:16]}"


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


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
        os.posix_spawn(sys.executable, program, {}, file_actions=streams, setsid=True)
    finally:
        os.close(lock)
