"""Folder in a host's memory that outlives a rank. See [Note: whose memory]."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from zero_core.checkpoint.in_memory import keeper
from zero_core.checkpoint.storage import Location
from zero_core.errors import CheckpointError, ConfigError

_BASE = Path("/dev/shm")
# Variables that torchrun gives to what it starts, the latter with a path of each rank's own.
_MARK, _ERRORS = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"
_WAIT_S = 15.0  # longer than the workers of a data loader take to notice the end of their rank


class Place:
    """A rank's use of the copies of a folder of checkpoints, until `close` or the process's end."""

    def __init__(self, path: str | None, directory: Location, rank: int) -> None:
        """Open the folder for ``directory``: in the user's ``path``, or the launcher's."""
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
        lock = _open(_BASE / f"zero-core-{user}.lock")
        try:
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
            _start_keeper(root, launcher, start)
        finally:
            os.close(lock)
        return root

    def close(self) -> None:
        while self._locks:
            os.close(self._locks.pop())

    def __del__(self) -> None:
        self.close()


def check_launcher() -> None:
    """Refuse a program that nothing would start anew."""
    if sys.platform != "linux" or _MARK not in os.environ:
        raise ConfigError(
            "memory_checkpoint: no launcher that would start this rank anew was found: start "
            "the ranks by torchrun or zero-engine on Linux, or give a folder in memory that "
            "outlives them as memory_checkpoint.path"
        )


def find_launcher() -> int:
    """Return the process that starts this rank anew.

    It is the nearest one above without the variables that the launcher gave to this rank: between
    them may be a shell, which ends with the rank. A launcher below another launcher has variables
    of the other one.
    """
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


def _start_keeper(root: Path, launcher: int, start: str) -> None:
    """Start the folder's keeper, if it has none. It inherits a lock that says so."""
    lock = _open(root / ".keeper")
    try:
        if not _has_lock(lock):
            return
        kept = subprocess.Popen(
            [sys.executable, "-I", "-S", keeper.__file__, str(root), str(launcher), start],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[lock],
            start_new_session=True,  # what ends the launcher's processes does not end it
        )
        kept.returncode = 0  # nobody waits for it
    finally:
        os.close(lock)
