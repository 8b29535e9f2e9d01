"""Folders of checkpoints in the file system of this machine.

A checkpoint is committed by one write: the rename of its folder, or of the object `MANIFEST` where
there are no renames (`Upload`). Files are opened only if they are regular, and written through.

Hidden names: ``.TAG.saving`` is a checkpoint under way, ``.TAG.old`` one that is being replaced,
``.latest.*.saving`` the file ``latest`` under way. By marks, ``.TOKEN-RANK``, ranks find out which
of them share a folder.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from zero_core.errors import CheckpointCorruptError, CheckpointError, CheckpointFailedError

MANIFEST = "manifest.json"
"""Name of the file that describes a checkpoint, and vouches for its other files."""
LATEST = "latest"
"""Name of the file that names the newest checkpoint of a folder."""
SUBFOLDER = re.compile(r"data-[0-9a-f]{32}")
"""Names of folders beside a manifest that have the files, where there are no renames."""
NO_SAVE_S = 24 * 3600
"""Seconds after which nothing belongs to a save under way, where no lock says so."""
ADVICE = "save to another place; checkpoints that were there before are whole"
"""The cure in errors of a save."""
_HIDDEN = re.compile(r"\.(?P<tag>.+)\.(?P<kind>saving|old)")
_MARK = re.compile(r"\.[0-9a-f]{32}-[0-9]+")
_TRIES = 200
_PAUSE_S = 0.01


class LocalEntry:
    """A location of this machine, seen as what its place permits. `RemotePath` has these, too."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, *, follows_links: bool) -> IO[bytes]:
        """Open a file for reading. See `zero_core.checkpoint.storage.location.open_regular`."""
        path = self._path
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follows_links else os.O_NOFOLLOW)
        try:
            if not follows_links and path.is_symlink():
                raise CheckpointCorruptError(
                    f"{path} is a link: put a copy of the file in its place"
                )
            file = os.fdopen(os.open(path, flags), "rb", buffering=0)
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"there is no file {path}") from None
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise CheckpointCorruptError(f"{path} cannot be read: {error}") from error
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise CheckpointCorruptError(f"{path} is not a regular file")
        return file

    @contextmanager
    def writing(self) -> Iterator[IO[bytes]]:
        """Create a file, which lasts from the end of the context on."""
        with create(self._path) as file:
            yield file
            os.fsync(file.fileno())

    def identity(self) -> list[Any]:
        """Return JSON that is equal on two ranks only if they see one file."""
        found = self._path.stat()
        return [found.st_ino, found.st_mtime_ns, found.st_ctime_ns]

    def modified_ns(self) -> int:
        return self._path.stat().st_mtime_ns

    def discard(self) -> None:
        """Remove a checkpoint's folder, hidden first: the next save removes what is left."""
        path = self._path
        hidden = path.with_name(f".{path.name.lstrip('.')}.{uuid.uuid4().hex}.saving")
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


class Aside:
    """A checkpoint under way, as `Upload` is one: its folder is locked to `commit` or `remove`."""

    subfolder: str | None = None  # the files are in the folder itself

    def __init__(self, directory: Path, tag: str) -> None:
        self.folder = directory / f".{tag}.saving"  # for its files
        self._place = directory / tag
        self._descriptor: int | None = None

    def make(self) -> None:
        """Remove what killed saves left beside it, make and lock the folder. One rank calls it."""
        remove_stale(self.folder.parent)
        is_lost = False
        for _ in range(_TRIES):
            try:
                self.folder.mkdir()
                descriptor, is_locked = _open_locked(self.folder)
                if is_locked is not False:
                    self._descriptor = descriptor
                    return
                os.close(descriptor)
            except FileExistsError:
                if not is_lost:
                    break
            except FileNotFoundError:
                pass
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
            raise no_room(self.folder / MANIFEST, error, ADVICE) from error

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
                LocalEntry(old).discard()
            if is_latest:
                mark.replace(directory / LATEST)
            sync_folder(directory)
        except OSError as error:
            raise no_room(place, error, ADVICE) from error
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


def _open_locked(folder: Path) -> tuple[int, bool | None]:
    """Open a folder, lock it until its descriptor is closed, and return whether it is locked.

    False: another program has the lock, or the name is another folder's by now. None: the file
    system has no locks.
    """
    is_locked: bool | None = True
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        is_locked = False
    except OSError:
        is_locked = None
    try:
        is_same = os.path.samestat(folder.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        os.close(descriptor)
        raise
    return descriptor, is_locked if is_same else False


def remove_stale(directory: Path) -> None:
    """Remove what killed saves left in ``directory``, and undo a replacement that was cut short.

    A save under way of a live program is left alone. Where the file system has no locks, so is all
    that is younger than a day, and so are marks in any case.
    """
    for path in sorted(directory.iterdir(), key=lambda path: (path.suffix != ".saving", path.name)):
        match = _HIDDEN.fullmatch(path.name)
        if match is None:
            if _MARK.fullmatch(path.name) and _is_past(path):
                path.unlink(missing_ok=True)
        elif path.is_symlink() or not path.is_dir():
            if match["tag"].startswith(LATEST) and match["kind"] == "saving":
                path.unlink(missing_ok=True)
        elif match["kind"] == "saving":
            with suppress(FileNotFoundError):  # another program was first
                descriptor, is_dead = _open_locked(path)
                if is_dead or (is_dead is None and _is_past(path)):
                    shutil.rmtree(path, ignore_errors=True)
                os.close(descriptor)
        elif not (directory / f".{match['tag']}.saving").exists():  # else it is being replaced
            place = directory / match["tag"]
            with suppress(OSError):  # another program was first
                if (place / MANIFEST).is_file():
                    LocalEntry(path).discard()
                elif (path / MANIFEST).is_file() and not place.exists():
                    path.rename(place)


def _is_past(path: Path) -> bool:
    """Whether ``path`` is too old to belong to a save under way."""
    try:
        return time.time() - path.lstat().st_mtime > NO_SAVE_S
    except FileNotFoundError:
        return False


def inode_of(path: Path) -> tuple[int, ...]:
    """Return the identity of a file, which a rewrite changes."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def link(known: str, inode: tuple[int, ...], path: Path) -> bool:
    """Link ``path`` to ``known`` if that still has ``inode``. Return whether it is linked."""
    try:
        os.link(known, path, follow_symlinks=False)
        if inode_of(path) == inode:
            return True
        path.unlink()
    except OSError:  # removed since, in another file system, or in one without links
        pass
    return False


def create(path: Path) -> IO[bytes]:
    """Create a file for writing, with the modes of any new file. What is there is never opened."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb", buffering=0)


def write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    """Write all of ``data``, whatever an unbuffered write takes at once."""
    left = memoryview(data)
    while left.nbytes:
        left = left[file.write(left) :]


def write_synced(path: Path, data: bytes) -> None:
    with LocalEntry(path).writing() as file:
        write_all(file, data)


def sync_folder(path: Path) -> None:
    """Write a folder's names through to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def no_room(
    path: object, error: OSError, advice: str = "give another folder"
) -> CheckpointFailedError:
    """Return the error of a file that could not be written."""
    return CheckpointFailedError(
        f"{path} could not be written ({error}): make room there, or {advice}"
    )
