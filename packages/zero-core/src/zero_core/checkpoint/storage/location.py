"""Locations of checkpoints, and what is done with them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import IO

from zero_core.checkpoint.storage.local import Aside, LocalEntry
from zero_core.checkpoint.storage.remote import RemotePath, Upload, open_url
from zero_core.errors import CheckpointError

Location = Path | RemotePath
"""Path of this machine, or one that fsspec reaches. Both have pathlib's names."""
Staging = Aside | Upload
"""A checkpoint under way."""
_URL = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]+(::[a-z].*)?):(?P<slashes>/+)", re.IGNORECASE)


def location_of(place: str | os.PathLike[str] | RemotePath) -> Location:
    """Return the location that a user has given: a path, or a URL such as ``s3://bucket/run``."""
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
