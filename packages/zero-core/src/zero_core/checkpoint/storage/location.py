"""Locations of checkpoints, and what is done with them."""

from __future__ import annotations

import os
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, Protocol

from zero_core.checkpoint.storage.local import LocalEntry
from zero_core.checkpoint.storage.remote import RemotePath, open_url
from zero_core.errors import CheckpointError

Location = Path | RemotePath
"""Path of this machine, or one that fsspec reaches. Both have pathlib's names."""
_URL = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]+(::[a-z].*)?):(?P<slashes>/+)", re.IGNORECASE)


class Staging(Protocol):
    """A checkpoint under way: nothing of it counts before `commit`.

    Attributes:
        folder: for its files.
        subfolder: its name within the checkpoint's folder, None where the files are in that.
    """

    @property
    def folder(self) -> Location: ...

    @property
    def subfolder(self) -> str | None: ...

    def make(self) -> None:
        """Make the folder, and remove what killed saves left. One rank calls it."""

    def describe(self, manifest: bytes) -> None:
        """Take the manifest, once all files are written."""

    def commit(self, *, is_latest: bool) -> None:
        """Make it the checkpoint of its tag, and with ``is_latest`` the newest one.

        Raises:
            CheckpointError: it could not be written.
        """

    def remove(self) -> None:
        """Remove what was written, if this rank made the folder and nothing was committed."""


class Entry(Protocol):
    """A location, seen as what its place permits."""

    def open(self, *, follows_links: bool) -> IO[bytes]:
        """Open a file for reading. See `open_regular`."""

    def writing(self) -> AbstractContextManager[IO[bytes]]:
        """Create a file, which lasts from the end of the context on."""

    def identity(self) -> list[Any]:
        """Return what two ranks that see one file have alike, as JSON."""

    def modified_ns(self) -> int:
        """Return when it was written last, in nanoseconds since the epoch."""

    def inode(self) -> tuple[int, ...] | None:
        """Return its identity, which a rewrite changes. None where it cannot be linked to."""

    def link_to(self, known: Any, inode: tuple[int, ...]) -> bool:
        """Have it hold the content of ``known``, which was ``inode``. Return whether it does."""

    def discard(self) -> None:
        """Remove a checkpoint's folder. Removed by half, it is no checkpoint."""

    def staging(self, tag: str, token: str) -> Staging:
        """Return a checkpoint under way in this folder.

        ``token`` is new, and the same on all ranks.
        """


def location_of(place: str | os.PathLike[str] | RemotePath) -> Location:
    """Return the location that a user has given: a path, or a URL such as ``s3://bucket/run``.

    Raises:
        CheckpointError: it is a URL that fsspec cannot open, or one that went through `Path`.
    """
    if isinstance(place, RemotePath):
        return place
    text = os.fspath(place)
    found = _URL.match(text)
    if found is None:
        return Path(text)
    if len(found["slashes"]) < 2:
        if isinstance(place, str):
            return Path(text)
        raise CheckpointError(f"{text} was a URL before it became a Path: give it as a string")
    if found["protocol"].lower() in ("file", "local"):
        return Path(text[found.end("protocol") + 3 :])
    return open_url(text)


def local_path(place: str | os.PathLike[str] | RemotePath, what: str) -> Path:
    """Return the path of this machine that a user has given for ``what``.

    Raises:
        CheckpointError: it is a URL.
    """
    found = location_of(place)
    if not isinstance(found, Path):
        raise CheckpointError(f"{place} is a URL, and {what} needs a folder of this machine")
    return found


def entry(place: Location) -> Entry:
    """Return what is done with ``place``."""
    return place if isinstance(place, RemotePath) else LocalEntry(place)


def open_regular(place: Location, *, follows_links: bool = True) -> IO[bytes]:
    """Open a regular file for reading. A pipe or a device neither blocks nor never ends.

    Raises:
        CheckpointError: there is no such file.
        CheckpointCorruptError: it cannot be read, is no regular file, or is a link and
            ``follows_links`` is false.
    """
    return entry(place).open(follows_links=follows_links)


def size_of(file: IO[bytes]) -> int:
    """Return the bytes of an open file."""
    position = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(position)
    return size
