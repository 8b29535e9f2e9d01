"""Direct I/O, which bypasses the page cache, and scratch files for it. Linux only.

[Note: direct I/O]
A file opened with O_DIRECT moves data between the disk and the caller's memory without a copy in
the page cache, which would take host memory that the offloading was to free. The kernel wants
offset, length and address in multiples of the device's block: `ALIGNMENT` serves every common one.
Aligned memory is transferred in place. The odd tail, and memory that is not aligned, goes through a
small aligned bounce buffer. io_uring and libaio would save the waiting threads. No long-lived
library brings either to Python with wheels, and requests of many MiB keep a disk busy from a few
threads.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

if sys.platform == "linux":
    import fcntl

ALIGNMENT = 4096
"""Bytes that direct I/O is aligned to."""
_BOUNCE_BYTES = 1 << 20
_NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY})

_Call = Callable[[int, list[memoryview], int], int]


def round_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def aligned_empty(num_bytes: int, *, pin_memory: bool = False) -> Tensor:
    """Allocate uninitialised uint8 host memory that direct I/O reads and writes in place."""
    whole = torch.empty(
        num_bytes + ALIGNMENT, dtype=torch.uint8, device="cpu", pin_memory=pin_memory
    )
    start = -whole.data_ptr() % ALIGNMENT
    return whole[start : start + num_bytes]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the tensor's memory, shared. The tensor must outlive it."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"file storage moves contiguous host memory, got a tensor of shape "
            f"{tuple(tensor.shape)} and strides {tensor.stride()} on {tensor.device}"
        )
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")


def check_folder(folder: str | Path) -> Path:
    """Return ``folder`` as a path, or raise ValueError unless files can be created in it."""
    if sys.platform != "linux":
        raise ValueError(f"storage on NVMe is served on Linux only, not on {sys.platform}")
    path = Path(folder)
    if not path.exists():
        raise ValueError(f"nvme_path {str(path)!r} does not exist: create the folder first")
    if not path.is_dir():
        raise ValueError(f"nvme_path {str(path)!r} is not a folder: name one on the NVMe disk")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"nvme_path {str(path)!r} is not writable for this user: change its mode")
    return path


class Scratch:
    """An open, unlinked file. ``path`` is the name that it had, for messages."""

    def __init__(self, fd: int, path: str, *, is_direct: bool) -> None:
        self.fd = fd
        self.path = path
        self.is_direct = is_direct
        self._local = threading.local()

    def read(self, view: memoryview, address: int, offset: int) -> None:
        """Fill ``view`` (memory at ``address``) from ``offset`` on, or raise OSError."""
        in_place = self._in_place(len(view), address)
        self._complete(os.preadv, view[:in_place], offset)
        for at in range(in_place, len(view), _BOUNCE_BYTES):
            part = view[at : at + _BOUNCE_BYTES]
            bounce = self._bounce(len(part))
            self._complete(os.preadv, bounce, offset + at)
            part[:] = bounce[: len(part)]

    def write(self, view: memoryview, address: int, offset: int) -> None:
        """Write ``view`` (memory at ``address``) to ``offset``, or raise OSError."""
        in_place = self._in_place(len(view), address)
        self._complete(os.pwritev, view[:in_place], offset)
        for at in range(in_place, len(view), _BOUNCE_BYTES):
            part = view[at : at + _BOUNCE_BYTES]
            bounce = self._bounce(len(part))
            bounce[: len(part)] = part
            self._complete(os.pwritev, bounce, offset + at)

    def _in_place(self, num_bytes: int, address: int) -> int:
        if not self.is_direct:
            return num_bytes
        return 0 if address % ALIGNMENT else num_bytes - num_bytes % ALIGNMENT

    def _bounce(self, num_bytes: int) -> memoryview:
        """This thread's bounce buffer, as long as an aligned transfer of ``num_bytes`` needs."""
        # foreign: threading.local, which each thread finds empty at first
        if not hasattr(self._local, "memory"):
            self._local.memory = aligned_empty(_BOUNCE_BYTES)  # keeps the view's memory alive
            self._local.view = bytes_of(self._local.memory)
        view: memoryview = self._local.view
        return view[: round_up(num_bytes)]

    def _complete(self, call: _Call, view: memoryview, offset: int) -> None:
        """Repeat ``call`` until all of ``view`` is moved: a system call may move less."""
        grain = ALIGNMENT if self.is_direct else 1
        done = 0
        while done < len(view):
            moved = call(self.fd, [view[done:]], offset + done)
            if moved < len(view) - done:
                moved -= moved % grain
            if moved <= 0:
                raise OSError(errno.EIO, "the file ends or stops before all bytes were moved")
            done += moved


def open_scratch(folder: str | Path, name: str, num_bytes: int) -> Scratch:
    """Create an unlinked file of ``num_bytes`` with all its blocks allocated.

    It is unlinked as soon as it is open, so that the disk space is freed however the process ends.
    Processes that share a folder get different files. ValueError says that no file can be made
    there, OSError that there is not enough room.
    """
    try:
        fd, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".bin", dir=check_folder(folder))
    except OSError as error:
        raise ValueError(f"no file can be made in nvme_path {str(folder)!r}: {error}") from error
    try:
        os.unlink(path)
        _allocate(fd, path, num_bytes)
        return Scratch(fd, path, is_direct=_go_direct(fd, folder, num_bytes))
    except BaseException:
        os.close(fd)
        raise


def _allocate(fd: int, path: str, num_bytes: int) -> None:
    if not num_bytes:
        return
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        os.truncate(fd, 0)  # what was allocated before it failed
        free = shutil.disk_usage(Path(path).parent).free
        raise OSError(
            error.errno,
            f"{os.strerror(error.errno or 0)}: allocating {num_bytes} bytes where {free} are "
            f"free; make room or name another nvme_path",
            path,
        ) from error


def _go_direct(fd: int, folder: str | Path, num_bytes: int) -> bool:
    """Switch the open file to O_DIRECT if the file system takes it, and return whether it did."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        if num_bytes:  # some file systems take the flag and refuse the transfer
            os.preadv(fd, [bytes_of(aligned := aligned_empty(ALIGNMENT))], 0)
            del aligned
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        warnings.warn(
            f"the file system of {str(folder)!r} has no direct I/O ({error}): reads and writes go "
            f"through the page cache and take host memory. Name an nvme_path on ext4 or XFS",
            RuntimeWarning,
            stacklevel=4,
        )
        return False
    return True
