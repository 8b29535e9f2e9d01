"""Files of checkpoints on the disk: opened only if they are regular, created, written through."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO

from zero_core.errors import CheckpointCorruptError, CheckpointError, CheckpointFailedError


def open_regular(path: Path, *, follows_links: bool = True) -> IO[bytes]:
    """Open a regular file for reading. A pipe or a device neither blocks nor never ends.

    Raises:
        CheckpointError: there is no such file.
        CheckpointCorruptError: it cannot be read, is no regular file, or is a link and
            ``follows_links`` is false.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follows_links else os.O_NOFOLLOW)
    try:
        if not follows_links and path.is_symlink():
            raise CheckpointCorruptError(f"{path} is a link: put a copy of the file in its place")
        file = os.fdopen(os.open(path, flags), "rb", buffering=0)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"there is no file {path}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise CheckpointCorruptError(f"{path} cannot be read: {error}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointCorruptError(f"{path} is not a regular file")
    return file


def create(path: Path) -> IO[bytes]:
    """Create a file for writing, with the modes of any new file. What is there is never opened.

    Raises:
        OSError: there is something of that name.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "wb", buffering=0)


def write_all(file: IO[bytes], data: bytes | memoryview) -> None:
    """Write all of ``data``, whatever an unbuffered write takes at once."""
    left = memoryview(data)
    while left.nbytes:
        left = left[file.write(left) :]


def write_synced(path: Path, data: bytes) -> None:
    """Create a file with ``data``, written through to the disk."""
    with create(path) as file:
        write_all(file, data)
        os.fsync(file.fileno())


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
