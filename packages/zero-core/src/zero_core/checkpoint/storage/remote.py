"""Folders of checkpoints that fsspec reaches: object stores, other machines, memory.

[Note: a commit without renames]
Object stores have neither renames nor links nor locks, but replace one object as a whole. So the
files of a save are in a folder of their own, ``TAG/data-TOKEN/``, which the manifest names. Writing
``TAG/manifest.json`` commits them. A checkpoint of the same tag that was there before is whole
until then, and removed afterwards. ``latest`` is one object, too. What a killed save left is never
read. The next save of its tag removes it after a day, and a removal of its tag at once.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC
from typing import IO, Any

from zero_core.checkpoint.storage import ADVICE, LATEST, MANIFEST, NO_SAVE_S, SUBFOLDER
from zero_core.checkpoint.storage.local import no_room
from zero_core.errors import CheckpointError, CheckpointFailedError

_log = logging.getLogger(__name__)
_NAMED = re.compile(f'"subfolder": "(?P<name>{SUBFOLDER.pattern})"'.encode())
_IN_PLACE = frozenset(("sftp", "ssh", "ftp", "smb", "webdav", "webhdfs", "hdfs", "dbfs"))
"""Protocols that write into the object that is there: a write that is cut short destroys it."""


class RemotePath:
    """A path of fsspec's, with methods of `pathlib.Path`. Its library's errors are OSErrors."""

    def __init__(self, files: Any, path: str, url: str, chain: str = "") -> None:
        """Stand for ``path`` of ``files``, an `AbstractFileSystem`, written ``url + chain``."""
        self._files = files
        self._path = path.rstrip("/")
        self._url = url.rstrip("/")
        self._chain = chain

    def __truediv__(self, name: str) -> RemotePath:
        return self._at(f"{self._path}/{name}", f"{self._url}/{name}")

    def _at(self, path: str, url: str) -> RemotePath:
        return RemotePath(self._files, path, url, self._chain)

    def __str__(self) -> str:
        return self._url + self._chain

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def name(self) -> str:
        return self._path.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return self._at(self._path.rpartition("/")[0], self._url.rpartition("/")[0])

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
        """Give the file system, without what a listing of before said. Its errors are OSErrors."""
        try:
            self._files.invalidate_cache()
            yield self._files
        except (OSError, CheckpointError):
            raise
        except Exception as error:
            raise OSError(f"{self}: {type(error).__name__}: {error}") from error

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        with self._store() as files:
            files.makedirs(self._path, exist_ok=exist_ok)

    def touch(self) -> None:
        self.write_bytes(b"")

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

    # ----------------------------------------- zero_core.checkpoint.storage.local.LocalEntry

    def open(self, *, follows_links: bool) -> IO[bytes]:
        try:
            with self._store() as files:  # or the size is that of a listing of before
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

    def identity(self) -> list[str]:
        return [str(self)]

    def modified_ns(self) -> int:
        with self._store() as files:
            found = files.modified(self._path)
        aware = found if found.tzinfo else found.replace(tzinfo=UTC)
        return int(aware.timestamp() * 1e9)

    def inode(self) -> None:
        return None

    def link_to(self, known: Any, inode: tuple[int, ...]) -> bool:
        return False

    def discard(self) -> None:
        """Remove the manifest, and then the files."""
        (self / MANIFEST).unlink(missing_ok=True)
        self.remove_tree()

    def staging(self, tag: str, token: str) -> Upload:
        return Upload(self, tag, token)

    def is_past(self) -> bool:
        """Whether this folder has files, all of them too old to belong to a save under way."""
        with self._store() as files:
            paths = files.find(self._path)
        files = [self._at(path, path) for path in paths]
        newest = max((file.modified_ns() for file in files), default=time.time_ns())
        return time.time() - newest / 1e9 > NO_SAVE_S

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


def open_url(url: str) -> RemotePath:
    """Return the path of ``url``."""
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
    first, mark, others = url.partition("::")  # dir://run::file:///store, but simplecache::s3://run
    return (
        RemotePath(files, path, first, mark + others)
        if "://" in first
        else RemotePath(files, path, url)
    )
