"""Locations of checkpoints: folders of this machine, and what fsspec reaches.

[Note: a commit without renames]
Object stores have neither renames nor links nor locks, but replace one object as a whole. So the
files of a save are in a folder of their own, ``TAG/data-TOKEN/``, which the manifest names. Writing
``TAG/manifest.json`` commits them. A checkpoint of the same tag that was there before is whole
until then, and removed afterwards. ``latest`` is one object, too. What a killed save left is never
read. The next save of its tag removes it after a day, and a removal of its tag at once.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC
from pathlib import Path
from typing import IO, Any

from zero_core.checkpoint.storage.local import (
    ADVICE,
    LATEST,
    MANIFEST,
    NO_SAVE_S,
    SUBFOLDER,
    Aside,
    LocalEntry,
    no_room,
)
from zero_core.errors import CheckpointError, CheckpointFailedError

_log = logging.getLogger(__name__)
_NAMED = re.compile(f'"subfolder": "(?P<name>{SUBFOLDER.pattern})"'.encode())
_URL = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]+(::[a-z].*)?):(?P<slashes>/+)", re.IGNORECASE)
_IN_PLACE = frozenset(("sftp", "ssh", "ftp", "smb", "webdav", "webhdfs", "hdfs", "dbfs"))
"""Protocols that write into the object that is there: a write that is cut short destroys it."""


@dataclass(frozen=True, repr=False)
class RemotePath:
    """A path of fsspec's, with methods of `pathlib.Path`. Its library's errors are OSErrors."""

    _files: Any = field(compare=False)  # an AbstractFileSystem
    _path: str = field(compare=False)  # within it
    _url: str
    _chain: str = ""  # the rest of a chained URL, behind this part of it

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
            self._files.invalidate_cache()  # or an earlier listing would answer
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

    # The methods of `LocalEntry`.

    def open(self, *, follows_links: bool) -> IO[bytes]:
        try:
            with self._store() as files:
                found: IO[bytes] = files.open(self._path, "rb")
                return found
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise CheckpointError(f"there is no file {self}") from None
        except OSError as error:
            raise CheckpointFailedError(f"{self} cannot be read: {error}") from error

    @contextmanager
    def writing(self) -> Iterator[IO[bytes]]:
        with self._store() as files, files.open(self._path, "wb") as file:
            yield file

    def identity(self) -> list[Any]:
        return [str(self)]

    def modified_ns(self) -> int:
        with self._store() as files:
            found = files.modified(self._path)
        aware = found if found.tzinfo else found.replace(tzinfo=UTC)
        return int(aware.timestamp() * 1e9)

    def discard(self) -> None:
        (self / MANIFEST).unlink(missing_ok=True)  # first: without it the rest is no checkpoint
        self.remove_tree()

    def is_past(self) -> bool:
        """Whether this folder has files, all of them too old to belong to a save under way."""
        with self._store() as files:
            paths = files.find(self._path)
        times = (RemotePath(self._files, path, path).modified_ns() for path in paths)
        return time.time() - max(times, default=time.time_ns()) / 1e9 > NO_SAVE_S

    def remove_tree(self) -> None:
        """Remove a folder that no checkpoint needs, if there is one and it can be removed."""
        try:
            with self._store() as files:
                files.rm(self._path, recursive=True)
        except FileNotFoundError:
            pass
        except OSError as error:
            _log.warning("%s stays, though no checkpoint needs it: %s", self, error)


class Upload:
    """A checkpoint under way, as `Aside` is one. See [Note: a commit without renames]."""

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
        replaced = None  # the folder of the checkpoint of this tag that is there
        try:
            manifest = self._place / MANIFEST
            with suppress(CheckpointError), manifest.open(follows_links=False) as file:
                replaced = _NAMED.search(file.read())
            manifest.write_bytes(self._manifest)
            self._is_own = False
            if is_latest:
                (self._place.parent / LATEST).write_bytes(self._place.name.encode())
        except OSError as error:
            raise no_room(self._place, error, ADVICE) from error
        try:  # it is committed: nothing of this may fail the save
            for old in [p for p in self._place.iterdir() if SUBFOLDER.fullmatch(p.name)]:
                is_replaced = replaced is not None and old.name == replaced["name"].decode()
                if old.name != self.folder.name and (is_replaced or old.is_past()):
                    old.remove_tree()
        except OSError as error:
            _log.warning("%s may have files that no checkpoint needs: %s", self._place, error)

    def remove(self) -> None:
        if self._is_own:
            self.folder.remove_tree()


Location = Path | RemotePath
"""Path of this machine, or one that fsspec reaches. Both have pathlib's names."""
Staging = Aside | Upload
"""A checkpoint under way."""


def location_of(place: str | os.PathLike[str] | RemotePath) -> Location:
    """Return the location that a user has given: a path, or a URL such as ``s3://bucket/run``."""
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
        from fsspec.core import url_to_fs  # torch brings it, and needs it for as little
    except ImportError:
        raise CheckpointError(
            f"{url}: checkpoints at URLs need fsspec: pip install 'zero-core[fsspec]'"
        ) from None
    try:
        files, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{url} cannot be opened: {error}") from None
    except Exception as error:  # whatever the library of the protocol raises
        raise CheckpointFailedError(
            f"{url} cannot be opened: {type(error).__name__}: {error}"
        ) from error
    first, mark, others = url.partition("::")
    # A path follows the first protocol of dir://run::file:///store, the last of simplecache::s3://x
    chain = mark + others if "://" in first else ""
    return RemotePath(files, path.rstrip("/"), url.removesuffix(chain).rstrip("/"), chain)


def local_path(place: str | os.PathLike[str] | RemotePath, what: str) -> Path:
    """Return the path of this machine that a user has given for ``what``."""
    found = location_of(place)
    if not isinstance(found, Path):
        raise CheckpointError(f"{place} is a URL, and {what} needs a folder of this machine")
    return found


def entry(place: Location) -> LocalEntry | RemotePath:
    return place if isinstance(place, RemotePath) else LocalEntry(place)


def open_regular(place: Location, *, follows_links: bool = True) -> IO[bytes]:
    """Open a regular file for reading. A pipe or a device neither blocks nor never ends."""
    return entry(place).open(follows_links=follows_links)


def size_of(file: IO[bytes]) -> int:
    position = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(position)
    return size
