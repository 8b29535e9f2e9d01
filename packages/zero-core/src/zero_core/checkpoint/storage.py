"""Storage of checkpoints: local folders, and any file system that fsspec supports.

One operation commits a checkpoint: for a local folder its rename (`Aside`), for another file system
the write of its manifest (`Upload`). Readers ignore a checkpoint until then.

Hidden names in a folder of checkpoints: ``.TAG.saving`` is a pending checkpoint, ``.TAG.old`` a
checkpoint that is being replaced, and ``.latest.*.saving`` the pending file ``latest``. Ranks write
marks, ``.TOKEN-RANK``, to detect which of them share a folder.

[Note: a commit without renames]
Object stores have no renames, links or locks, but replace one object atomically. The files of a
save are therefore in a separate folder, ``TAG/data-TOKEN/``, which the manifest names. Writing
``TAG/manifest.json`` commits them. An earlier checkpoint of the same tag stays complete until then,
and is removed afterwards. ``latest`` is also one object. Files of a killed save are never read. A
save of the same tag removes them if they are older than a day. A removal of the tag removes them.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC
from pathlib import Path
from typing import IO, Any

from zero_core.errors import CheckpointCorruptError, CheckpointError, CheckpointFailedError

_log = logging.getLogger(__name__)
MANIFEST = "manifest.json"  # describes a checkpoint, with checksums of its other files
LATEST = "latest"  # file with the tag of the newest checkpoint of a folder
SUBFOLDER = re.compile(r"data-[0-9a-f]{32}")  # folder of a checkpoint's files: see `Upload`
ADVICE = "save to another place; checkpoints that were there before are whole"
_NO_SAVE_S = 24 * 3600  # age at which files without locks count as those of a killed save
_HIDDEN = re.compile(r"\.(?P<tag>.+)\.(?P<kind>saving|old)")
_MARK = re.compile(r"\.[0-9a-f]{32}-[0-9]+")
_TRIES = 200
_PAUSE_S = 0.01
_NAMED = re.compile(f'"subfolder": "({SUBFOLDER.pattern})"'.encode())
_URL = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]+(::[a-z].*)?):(?P<slashes>/+)", re.IGNORECASE)
_IN_PLACE = frozenset(("sftp", "ssh", "ftp", "smb", "webdav", "webhdfs", "hdfs", "dbfs"))
"""Protocols that overwrite files in place: an interrupted write destroys the earlier file."""


@dataclass(frozen=True, repr=False)
class RemotePath:
    """A path of fsspec with methods as in `pathlib.Path`. Errors of its library become OSErrors."""

    _files: Any = field(compare=False)  # an AbstractFileSystem
    _path: str = field(compare=False)  # path within ``_files``
    _url: str
    _chain: str = ""  # the part of a chained URL after this path

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self._files, f"{self._path}/{name}", f"{self._url}/{name}", self._chain)

    def __str__(self) -> str:
        return self._url + self._chain

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    @property
    def name(self) -> str:
        return self._path.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        path, url = self._path.rpartition("/")[0], self._url.rpartition("/")[0]
        return RemotePath(self._files, path, url, self._chain)

    def absolute(self) -> RemotePath:
        return self

    def exists(self) -> bool:
        with self._store() as files:
            return bool(files.exists(self._path))

    def is_file(self) -> bool:
        with self._store() as files:
            return bool(files.isfile(self._path))

    def is_dir(self) -> bool:
        with self._store() as files:
            return bool(files.isdir(self._path))

    def iterdir(self) -> Iterator[RemotePath]:
        with self._store() as files:
            names = files.ls(self._path, detail=False)
        for name in names:
            yield self / str(name).rstrip("/").rpartition("/")[2]

    @contextmanager
    def _store(self) -> Iterator[Any]:
        try:
            self._files.invalidate_cache()  # fsspec could return an old listing
            yield self._files
        except (OSError, CheckpointError):
            raise
        except Exception as error:
            raise OSError(f"{self}: {type(error).__name__}: {error}") from error

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        with self._store() as files:
            files.makedirs(self._path, exist_ok=exist_ok)

    def write_bytes(self, data: bytes) -> None:
        with self._store() as files:
            files.pipe_file(self._path, data)

    def unlink(self, *, missing_ok: bool = False) -> None:
        try:
            with self._store() as files:
                files.rm_file(self._path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def open(self) -> IO[bytes]:
        with self._store() as files:
            found: IO[bytes] = files.open(self._path, "rb")
            return found

    @contextmanager
    def writing(self) -> Iterator[IO[bytes]]:
        with self._store() as files, files.open(self._path, "wb") as file:
            yield file

    def modified_ns(self) -> int:
        with self._store() as files:
            found = files.modified(self._path)
        aware = found if found.tzinfo else found.replace(tzinfo=UTC)
        return int(aware.timestamp() * 1e9)

    def is_past(self) -> bool:
        """Whether this folder has files, and none is recent enough for a pending save."""
        with self._store() as files:
            found = [RemotePath(files, path, path) for path in files.find(self._path)]
        newest = max((path.modified_ns() for path in found), default=time.time_ns())
        return time.time() - newest / 1e9 > _NO_SAVE_S

    def remove_tree(self) -> None:
        """Remove this folder if it exists. Log a warning if it cannot be removed."""
        try:
            with self._store() as files:
                files.rm(self._path, recursive=True)
        except FileNotFoundError:
            pass
        except OSError as error:
            _log.warning("%s stays, though no checkpoint needs it: %s", self, error)


class Aside:
    """A pending checkpoint in a local folder, which is locked until `commit` or `remove`."""

    subfolder: str | None = None  # None: the files are in the folder itself

    def __init__(self, directory: Path, tag: str) -> None:
        self.folder = directory / f".{tag}.saving"  # folder of the files until `commit`
        self._place = directory / tag
        self._descriptor: int | None = None

    def make(self) -> None:
        """Remove files of killed saves, and make and lock the folder, on one rank per folder."""
        remove_stale(self.folder.parent)
        if self._place.is_file():
            raise CheckpointError(f"{self._place} is a file: move it, or give another tag")
        for attempt in range(_TRIES):
            try:
                self.folder.mkdir()
                descriptor, is_locked = _open_locked(self.folder)
                if is_locked is not False:
                    self._descriptor = descriptor
                    return
                os.close(descriptor)
            except FileExistsError:
                if attempt == 0:
                    break
            except FileNotFoundError:
                pass
            # Another program has mistaken the folder for that of a killed save and removes it.
            time.sleep(_PAUSE_S)
        raise CheckpointError(
            f"{self.folder} is there: another program saves this checkpoint. Wait for it, or "
            "save to another folder"
        )

    def describe(self, manifest: bytes) -> None:
        """Write the manifest, and flush the folder to the disk."""
        with storing(self.folder / MANIFEST, ADVICE):
            write_synced(self.folder / MANIFEST, manifest)
            sync_folder(self.folder)

    def commit(self, *, is_latest: bool) -> None:
        """Rename the folder to its tag, and replace an earlier folder except for others' files."""
        place = self._place
        directory, old = place.parent, place.with_name(f".{place.name}.old")
        mark = directory / f".{LATEST}.{uuid.uuid4().hex}.saving"
        with storing(place, ADVICE):
            try:
                if is_latest:
                    write_synced(mark, place.name.encode())
                if place.exists():
                    _discard_replaced(old, place)
                    place.rename(old)
                self.folder.rename(place)
                self._unlock()
                _discard_replaced(old, place)
                if is_latest:
                    mark.replace(directory / LATEST)
                sync_folder(directory)
            finally:
                mark.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder if this object made it and did not commit it."""
        if self._descriptor is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._unlock()

    def _unlock(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Upload:
    """A pending checkpoint on a remote file system. See [Note: a commit without renames]."""

    def __init__(self, directory: RemotePath, tag: str, token: str) -> None:
        self.subfolder: str | None = f"data-{token}"
        self.folder = directory / tag / self.subfolder
        self._place = directory / tag
        self._is_own = False
        self._manifest = b""

    def make(self) -> None:
        self._is_own = True
        self.folder.mkdir(parents=True, exist_ok=True)

    def describe(self, manifest: bytes) -> None:
        self._manifest = manifest

    def commit(self, *, is_latest: bool) -> None:
        replaced = None  # folder of the checkpoint that this one replaces
        with storing(self._place, ADVICE):
            manifest = self._place / MANIFEST
            with suppress(CheckpointError), open_regular(manifest) as file:
                replaced = _NAMED.search(file.read())
            manifest.write_bytes(self._manifest)
            self._is_own = False
            if is_latest:
                (self._place.parent / LATEST).write_bytes(self._place.name.encode())
        try:  # the save is committed, so an error here must not fail it
            for old in [p for p in self._place.iterdir() if SUBFOLDER.fullmatch(p.name)]:
                is_replaced = replaced is not None and old.name == replaced[1].decode()
                if old.name != self.folder.name and (is_replaced or old.is_past()):
                    old.remove_tree()
        except OSError as error:
            _log.warning("%s may have files that no checkpoint needs: %s", self._place, error)

    def remove(self) -> None:
        if self._is_own:
            self.folder.remove_tree()


Location = Path | RemotePath
"""A local path, or a path of fsspec."""
Staging = Aside | Upload
"""A pending checkpoint."""


def location_of(place: str | os.PathLike[str] | RemotePath) -> Location:
    """Return the location of a path, or of a URL such as ``s3://bucket/run``."""
    if isinstance(place, RemotePath):
        return place
    url = os.fspath(place)
    found = _URL.match(url)
    if found is None:
        return Path(url)
    if len(found["slashes"]) < 2:
        if isinstance(place, str):
            return Path(url)
        raise CheckpointError(f"{url} was a URL before it became a Path: give it as a string")
    if found["protocol"].lower() in ("file", "local"):
        return Path(url[found.end("protocol") + 3 :])
    protocols = {part.partition("://")[0].lower() for part in url.split("::")}
    if protocols & _IN_PLACE:
        raise CheckpointError(
            f"{url}: {', '.join(sorted(protocols & _IN_PLACE))} writes into the files that are "
            "there, so a write that is cut short would destroy a checkpoint: give an object store "
            "(s3, gs, abfs, ...) or a folder that is mounted here"
        )
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise CheckpointError(
            f"{url}: checkpoints at URLs need fsspec: pip install fsspec"
        ) from None
    try:
        files, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{url} cannot be opened: {error}") from None
    except Exception as error:  # any exception of the protocol's library
        raise CheckpointFailedError(
            f"{url} cannot be opened: {type(error).__name__}: {error}"
        ) from error
    first, mark, others = url.partition("::")
    # In dir://run::file:///store the path follows the first protocol, in simplecache::s3://x the
    # last one.
    chain = mark + others if "://" in first else ""
    return RemotePath(files, path.rstrip("/"), url.removesuffix(chain).rstrip("/"), chain)


def local_path(place: str | os.PathLike[str] | RemotePath, what: str) -> Path:
    """Return ``place`` as a local path. Raise CheckpointError, which names ``what``, for a URL."""
    found = location_of(place)
    if not isinstance(found, Path):
        raise CheckpointError(f"{place} is a URL, and {what} needs a folder of this machine")
    return found


def open_regular(place: Location, *, follows_links: bool = True) -> IO[bytes]:
    """Open a regular file for reading. Raise for a pipe or device, which could block."""
    if isinstance(place, RemotePath):
        try:
            return place.open()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise CheckpointError(f"there is no file {place}") from None
        except OSError as error:
            raise CheckpointFailedError(f"{place} cannot be read: {error}") from error
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follows_links else os.O_NOFOLLOW)
    try:
        if not follows_links and place.is_symlink():
            raise CheckpointCorruptError(f"{place} is a link: put a copy of the file in its place")
        file = os.fdopen(os.open(place, flags), "rb", buffering=0)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"there is no file {place}") from None
    except (OSError, ValueError) as error:  # ValueError: the name has a NUL
        raise CheckpointCorruptError(f"{place} cannot be read: {error}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointCorruptError(f"{place} is not a regular file")
    return file


def size_of(file: IO[bytes]) -> int:
    position = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(position)
    return size


@contextmanager
def writing(place: Location) -> Iterator[IO[bytes]]:
    """Write a file. A local one must be new, and is flushed to the disk at the context's end."""
    if isinstance(place, RemotePath):
        with place.writing() as file:
            yield file
        return
    with place.open("xb", buffering=0) as file:  # "x" fails on an existing file or link
        yield file
        os.fsync(file.fileno())


def discard(place: Location) -> None:
    """Remove a checkpoint's folder. Readers never find a checkpoint that is removed in part."""
    if isinstance(place, RemotePath):
        (place / MANIFEST).unlink(missing_ok=True)
        place.remove_tree()
        return
    hidden = place.with_name(f".{place.name.lstrip('.')}.{uuid.uuid4().hex}.saving")
    place.rename(hidden)  # if the removal fails, the next save removes the folder
    shutil.rmtree(hidden, ignore_errors=True)


def _discard_replaced(old: Path, place: Path) -> None:
    """Remove ``old``, but move entries that its manifest does not name to ``place``."""
    if old.is_symlink():
        old.unlink(missing_ok=True)
        return
    own = {MANIFEST}
    with suppress(OSError, ValueError, LookupError, TypeError):  # it was not a checkpoint
        own.update(json.loads((old / MANIFEST).read_bytes())["files"])
    with suppress(FileNotFoundError):  # there is no ``old``, or another program has removed it
        for path in old.iterdir():
            if path.name not in own and not os.path.lexists(place / path.name):
                path.rename(place / path.name)
        discard(old)


def _open_locked(folder: Path) -> tuple[int, bool | None]:
    """Open and lock a folder. Return its descriptor, and whether it is locked.

    Closing the descriptor unlocks the folder. False: another program has the lock, or the name now
    belongs to another folder. None: the file system has no locks.
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
    """Remove files of killed saves in ``directory``, and end or undo an interrupted replacement.

    A live program's lock protects the folder of its pending save. On a file system without locks,
    such folders are kept for a day. Marks and pending files ``latest`` are always kept for a day.
    """
    for path in sorted(directory.iterdir(), key=lambda path: (path.suffix != ".saving", path.name)):
        match = _HIDDEN.fullmatch(path.name)
        if match is None:
            if _MARK.fullmatch(path.name) and _is_past(path):
                path.unlink(missing_ok=True)
        elif path.is_symlink() or not path.is_dir():
            if match["tag"].startswith(LATEST) and match["kind"] == "saving" and _is_past(path):
                path.unlink(missing_ok=True)
        elif match["kind"] == "saving":
            with suppress(FileNotFoundError):  # another program has removed it
                descriptor, is_dead = _open_locked(path)
                if is_dead or (is_dead is None and _is_past(path)):
                    shutil.rmtree(path, ignore_errors=True)
                os.close(descriptor)
        elif not (directory / f".{match['tag']}.saving").exists():  # interrupted replacement
            place = directory / match["tag"]
            with suppress(OSError):  # another program has removed or renamed it
                if (place / MANIFEST).is_file():
                    _discard_replaced(path, place)
                elif (path / MANIFEST).is_file() and not place.exists():
                    path.rename(place)


def _is_past(path: Path) -> bool:
    """Whether ``path`` is too old to belong to a pending save."""
    with suppress(FileNotFoundError):
        return time.time() - path.lstat().st_mtime > _NO_SAVE_S
    return False


def inode_of(path: Path) -> tuple[int, ...]:
    """Return device, inode, size and modification time. A rewrite changes at least one."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def link(known: str, inode: tuple[int, ...], path: Path) -> bool:
    """Link ``path`` to ``known``. Return False on failure, or if `inode_of` is not ``inode``."""
    with suppress(OSError):  # ``known`` was removed, or cannot be linked
        os.link(known, path, follow_symlinks=False)
        if inode_of(path) == inode:
            return True
        path.unlink()
    return False


def write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    """Write all of ``data``. A single unbuffered write may accept only a part."""
    left = memoryview(data)
    while left.nbytes:
        left = left[file.write(left) :]


def write_synced(path: Path, data: bytes) -> None:
    with writing(path) as file:
        write_all(file, data)


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def storing(path: object, advice: str = "give another folder") -> Iterator[None]:
    """Convert an OSError in this context, which writes ``path``, to `CheckpointFailedError`."""
    try:
        yield
    except OSError as error:
        raise CheckpointFailedError(
            f"{path} could not be written ({error}): make room there, or {advice}"
        ) from error
