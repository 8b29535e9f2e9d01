"""Folders of checkpoints in the file system of this machine.

Hidden names in a folder of checkpoints: ``.TAG.saving`` is one under way, ``.TAG.old`` one that is
being replaced, ``.latest.*.saving`` the file ``latest`` under way. By marks, ``.TOKEN-RANK``, ranks
find out which of them share a folder.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from zero_core.checkpoint.storage import LATEST, MANIFEST
from zero_core.checkpoint.storage.disk import (
    create,
    no_room,
    open_regular,
    sync_folder,
    write_synced,
)
from zero_core.errors import CheckpointError

_HIDDEN = re.compile(r"\.(?P<tag>.+)\.(?P<kind>saving|old)")
_MARK = re.compile(r"\.[0-9a-f]{32}-[0-9]+")
_NO_SAVE_S = 24 * 3600
"""Seconds after which nothing that is hidden belongs to a save under way, where no lock says so."""
_TRIES = 200
_PAUSE_S = 0.01
_ADVICE = "save to another folder; checkpoints that were there before are whole"


class LocalEntry:
    """A path of this machine. See `zero_core.checkpoint.storage.location.Entry`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, *, follows_links: bool) -> IO[bytes]:
        return open_regular(self._path, follows_links=follows_links)

    @contextmanager
    def writing(self) -> Iterator[IO[bytes]]:
        with create(self._path) as file:
            yield file
            os.fsync(file.fileno())

    def identity(self) -> list[int]:
        found = self._path.stat()
        return [found.st_ino, found.st_mtime_ns, found.st_ctime_ns]

    def modified_ns(self) -> int:
        return self._path.stat().st_mtime_ns

    def inode(self) -> tuple[int, ...]:
        found = self._path.stat()
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def link_to(self, known: Path, inode: tuple[int, ...]) -> bool:
        try:
            os.link(known, self._path, follow_symlinks=False)
            if self.inode() == inode:
                return True
            self._path.unlink()
        except OSError:  # removed since, in another file system, or in one without links
            pass
        return False

    def discard(self) -> None:
        _discard(self._path)

    def staging(self, tag: str, token: str) -> Aside:
        return Aside(self._path, tag)


class Aside:
    """Folder of a checkpoint under way, locked until it is renamed or removed.

    See `zero_core.checkpoint.storage.location.Staging`.

    Attributes:
        folder: its path.
        subfolder: None.
    """

    def __init__(self, directory: Path, tag: str) -> None:
        self.folder = directory / f".{tag}.saving"
        self.subfolder: str | None = None
        self._place = directory / tag
        self._descriptor: int | None = None

    def make(self) -> None:
        """Remove what killed saves left in the folder of checkpoints, then make and lock this one.

        Raises:
            CheckpointError: another program saves the same tag there.
        """
        remove_stale(self.folder.parent)
        is_lost = False
        for _ in range(_TRIES):
            try:
                self.folder.mkdir()
                self._descriptor = _open_locked(self.folder)
            except FileExistsError:
                if not is_lost:
                    break
            if self._descriptor is not None:
                return
            # Another program took it for one that a killed save left, and is removing it.
            is_lost = True
            time.sleep(_PAUSE_S)
        raise CheckpointError(
            f"{self.folder} is there: another program saves this checkpoint. Wait for it, or "
            "save to another folder"
        )

    def describe(self, manifest: bytes) -> None:
        """Write the manifest and the names in the folder through to the disk."""
        try:
            write_synced(self.folder / MANIFEST, manifest)
            sync_folder(self.folder)
        except OSError as error:
            raise no_room(self.folder / MANIFEST, error, _ADVICE) from error

    def commit(self, *, is_latest: bool) -> None:
        """Rename the folder to the checkpoint's, whose old content stays readable until then."""
        place = self._place
        directory, old = place.parent, place.with_name(f".{place.name}.old")
        mark = directory / f".{LATEST}.{uuid.uuid4().hex}.saving"
        try:
            if is_latest:
                write_synced(mark, place.name.encode())
            if place.exists():
                shutil.rmtree(old, ignore_errors=True)
                place.rename(old)
            self.folder.rename(place)
            self._close()
            if old.exists():
                _discard(old)
            if is_latest:
                mark.replace(directory / LATEST)
            sync_folder(directory)
        except OSError as error:
            raise no_room(place, error, _ADVICE) from error
        finally:
            mark.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder if this object made it and it was not renamed."""
        if self._descriptor is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _open_locked(folder: Path) -> int | None:
    """Open and lock a folder that was just made. None: another program is removing it."""
    try:
        descriptor = _open(folder)
    except FileNotFoundError:
        return None
    try:
        is_own = _lock(descriptor) is not False
        if is_own and os.path.samestat(folder.stat(), os.fstat(descriptor)):
            return descriptor
    except FileNotFoundError:
        pass
    os.close(descriptor)
    return None


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _lock(descriptor: int) -> bool | None:
    """Lock a folder until its descriptor is closed.

    Returns:
        Whether it is locked now. False: another program has the lock. None: the file system has no
        locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def remove_stale(directory: Path) -> None:
    """Remove what killed saves left in ``directory``, and undo a replacement that was cut short.

    A save under way of a live program is left alone. Where the file system has no locks, so is all
    that is younger than a day, and so are marks in any case.
    """
    for path in sorted(directory.iterdir(), key=_saving_first):
        match = _HIDDEN.fullmatch(path.name)
        if match is None:
            if _MARK.fullmatch(path.name) and _is_past(path):
                path.unlink(missing_ok=True)
        elif path.is_symlink() or not path.is_dir():
            if match["tag"].startswith(LATEST) and match["kind"] == "saving":
                path.unlink(missing_ok=True)
        elif match["kind"] == "saving":
            _remove_unlocked(path)
        elif not (directory / f".{match['tag']}.saving").exists():  # else it is being replaced
            with suppress(OSError):  # another program was first
                _settle(path, directory / match["tag"])


def _settle(old: Path, place: Path) -> None:
    """Remove what ``place`` has replaced, or put it back if that was never done."""
    if place.joinpath(MANIFEST).is_file():
        _discard(old)
    elif old.joinpath(MANIFEST).is_file() and not place.exists():
        old.rename(place)


def _saving_first(path: Path) -> tuple[bool, str]:
    return path.suffix != ".saving", path.name


def _is_past(path: Path) -> bool:
    """Whether ``path`` is too old to belong to a save under way."""
    try:
        return time.time() - path.lstat().st_mtime > _NO_SAVE_S
    except FileNotFoundError:
        return False


def _remove_unlocked(path: Path) -> None:
    try:
        descriptor = _open(path)
    except FileNotFoundError:  # another program was first
        return
    try:
        is_dead = _lock(descriptor)
        # The name may be that of a new save by now, whose folder has another lock.
        is_same = os.path.samestat(path.stat(), os.fstat(descriptor))
        if is_same and (is_dead or (is_dead is None and _is_past(path))):
            shutil.rmtree(path, ignore_errors=True)
    except FileNotFoundError:  # another program was first
        pass
    finally:
        os.close(descriptor)


def _discard(path: Path) -> None:
    """Remove a folder, under a hidden name: the next save removes what is left if it is cut short.

    Raises:
        OSError: it cannot be renamed.
    """
    hidden = path.with_name(f".{path.name.lstrip('.')}.{uuid.uuid4().hex}.saving")
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)
