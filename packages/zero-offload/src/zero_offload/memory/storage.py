"""Blocks of a scratch file, which are read and written asynchronously and have checksums.

`BlockFile` keeps optimizer states or parameter shards on NVMe and overlaps their transfers with
other work, as the infinity offload engine of ZeRO-Infinity does (arXiv 2104.07857).

[Note: terms]
block     range of the file with a fixed length, transferred as a whole.
transfer  asynchronous read or write of one block, in a thread of the file's pool.
checksum  XXH3 (64 bits) of each block, computed at a write and compared at a read.

[Note: direct I/O]
O_DIRECT bypasses the page cache, which would use the host memory that offloading saves. It needs
file offset, length and address in multiples of the device's block size. `ALIGNMENT` is a multiple
of the usual ones. An unaligned tail, or unaligned memory, is copied through a bounce buffer.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from xxhash import xxh3_64

from zero_offload.errors import StorageCorruptError, StorageError
from zero_offload.threads import Threads

if sys.platform == "linux":
    import fcntl

ALIGNMENT = 4096
"""Alignment for direct I/O, in bytes."""
_BOUNCE_BYTES = 1 << 20
_NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY})

_Call = Callable[[int, list[memoryview], int], int]


def round_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def aligned_empty(num_bytes: int, *, pin_memory: bool = False) -> Tensor:
    """Allocate uninitialized uint8 host memory that is aligned for direct I/O."""
    whole = torch.empty(
        num_bytes + ALIGNMENT, dtype=torch.uint8, device="cpu", pin_memory=pin_memory
    )
    start = -whole.data_ptr() % ALIGNMENT
    return whole[start : start + num_bytes]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a view of the tensor's memory. The tensor must outlive the view."""
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


def _open_unlinked(folder: str | Path, name: str, num_bytes: int) -> tuple[int, str, bool]:
    """Return the descriptor and former name of a new file, and whether it has direct I/O.

    All its blocks are allocated. If no file can be created, ValueError is raised. A full disk
    raises OSError.
    """
    try:
        fd, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".bin", dir=check_folder(folder))
    except OSError as error:
        raise ValueError(f"no file can be made in nvme_path {str(folder)!r}: {error}") from error
    try:
        os.unlink(path)
        _allocate(fd, path, num_bytes)
        return fd, path, _go_direct(fd, folder, num_bytes)
    except BaseException:
        os.close(fd)
        raise


def _allocate(fd: int, path: str, num_bytes: int) -> None:
    if not num_bytes:
        return
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        os.truncate(fd, 0)  # Free the blocks that were allocated before the failure.
        free = shutil.disk_usage(Path(path).parent).free
        raise OSError(
            error.errno,
            f"{os.strerror(error.errno or 0)}: allocating {num_bytes} bytes where {free} are "
            f"free; make room or name another nvme_path",
            path,
        ) from error


def _go_direct(fd: int, folder: str | Path, num_bytes: int) -> bool:
    """Switch the open file to O_DIRECT. Return False if the file system does not support it."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        if num_bytes:  # Some file systems accept the flag but fail at the first read.
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


_NUM_THREADS = 4
_SPAN_BYTES = 4 << 20
"""Maximum bytes per system call, few enough that the checksum finds them in the CPU cache."""


class Transfer:
    """Handle of a pending read or write. Its tensor must not be used until `wait` returns."""

    def __init__(self, future: Future[None], file: BlockFile) -> None:
        self._future = future
        self._file = file

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        """Block until the transfer is complete. Raise StorageError if it failed."""
        if not self._future.done():
            begin = time.perf_counter()
            wait([self._future])
            self._file.waited(time.perf_counter() - begin)
        self._future.result()

    def settle(self) -> None:
        """Block until the transfer is complete, and ignore a failure."""
        wait([self._future])


class BlockFile:
    """Blocks of fixed lengths in one preallocated file, read and written in the background.

    The constructor allocates and unlinks the file. It raises ValueError for an unusable folder and
    StorageError for a full disk, and warns if the file system has no direct I/O (``is_direct``). A
    block that was never written reads as zeros. Transfers run in any order, at most one per block.

    Attributes:
        bytes_read, bytes_written: bytes of blocks so far, not rounded up to `ALIGNMENT`.
        io_s: seconds during which at least one transfer was running.
        waited_s: seconds that callers spent in `Transfer.wait`.
    """

    def __init__(
        self, folder: str | Path, block_bytes: Sequence[int], *, name: str = "blocks"
    ) -> None:
        self.bytes_read = self.bytes_written = 0
        self.io_s = self.waited_s = 0.0
        self._lock = threading.Lock()
        self._num_running = 0
        self._since = 0.0
        self.block_bytes = tuple(block_bytes)
        self._offsets: list[int] = []
        self.num_bytes = 0
        for length in self.block_bytes:
            self._offsets.append(self.num_bytes)
            self.num_bytes += round_up(length)
        self._checksums: list[int | None] = [None] * len(self.block_bytes)
        self._lost: dict[int, StorageError] = {}
        self._current: dict[int, Future[None]] = {}
        try:
            self._fd, self.path, self.is_direct = _open_unlinked(folder, name, self.num_bytes)
        except OSError as error:
            raise StorageError(error.errno, str(error.strerror), str(error.filename)) from error
        self._local = threading.local()
        # A running transfer keeps this object alive, so the descriptor is closed after all of them.
        self._closer = weakref.finalize(self, os.close, self._fd)
        self._threads = Threads(_NUM_THREADS, thread_name_prefix=f"storage-{name}")

    def read(self, block: int, tensor: Tensor) -> Transfer:
        """Start to fill ``tensor`` (CPU, contiguous, as many bytes as the block) with a block.

        With direct I/O, memory that is not aligned to `ALIGNMENT` needs a bounce buffer.
        """
        return self._start(self.read_block, block, tensor)

    def write(self, block: int, tensor: Tensor) -> Transfer:
        """Start to write ``tensor`` to a block. If it fails, reads of the block raise the error."""
        return self._start(self.write_block, block, tensor)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time in this context as ``io_s``. Concurrent transfers count once."""
        with self._lock:
            if not self._num_running:
                self._since = time.perf_counter()
            self._num_running += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_running -= 1
                if not self._num_running:
                    self.io_s += time.perf_counter() - self._since

    def waited(self, seconds: float) -> None:
        with self._lock:
            self.waited_s += seconds

    def fileno(self) -> int:
        return self._fd

    def offset(self, block: int) -> int:
        return self._offsets[block]

    def traffic(self) -> tuple[int, int]:
        """Wait for pending transfers, and return `bytes_read` and `bytes_written`."""
        wait(list(self._current.values()))
        return self.bytes_read, self.bytes_written

    def close(self) -> None:
        """Wait for pending transfers and free the disk space. Further calls have no effect."""
        self._threads.shutdown()
        self._closer()

    def _start(self, job: Callable[[int, Tensor], None], block: int, tensor: Tensor) -> Transfer:
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes != self.block_bytes[block]:
            raise ValueError(
                f"block {block} of {self.path} has {self.block_bytes[block]} bytes, the tensor "
                f"has {num_bytes}"
            )
        current = self._current.get(block)
        if current is not None and not current.done():
            raise ValueError(f"block {block} of {self.path} is under way: wait for that first")
        future = self._threads.submit(job, block, tensor)
        self._current[block] = future
        return Transfer(future, self)

    def read_block(self, block: int, tensor: Tensor) -> None:
        if block in self._lost:
            raise self._lost[block]
        expected = self._checksums[block]
        if expected is None:
            tensor.zero_()
            return
        with self.running(), self._explained("reading", block):
            checksum = xxh3_64()
            for span, address, offset in self._spans(block, tensor):
                self._move(os.preadv, span, address, offset)
                checksum.update(span)
        with self._lock:
            self.bytes_read += self.block_bytes[block]
        found = checksum.intdigest()
        if found != expected:
            raise StorageCorruptError(
                errno.EIO,
                f"block {block} at offset {self._offsets[block]} has checksum {found:#018x}, "
                f"was written with {expected:#018x}: the disk or its driver damages data. Load a "
                f"checkpoint into a new run and name an nvme_path on another disk",
                self.path,
            )

    def write_block(self, block: int, tensor: Tensor) -> None:
        self._checksums[block] = None
        checksum = xxh3_64()
        try:
            with self.running(), self._explained("writing", block):
                for span, address, offset in self._spans(block, tensor):
                    checksum.update(span)
                    self._move(os.pwritev, span, address, offset)
        except StorageError as error:
            self._lost[block] = error
            raise
        self._lost.pop(block, None)
        self._checksums[block] = checksum.intdigest()
        with self._lock:
            self.bytes_written += self.block_bytes[block]

    def _spans(self, block: int, tensor: Tensor) -> Iterator[tuple[memoryview, int, int]]:
        view, address, offset = bytes_of(tensor), tensor.data_ptr(), self._offsets[block]
        for at in range(0, len(view), _SPAN_BYTES):
            yield view[at : at + _SPAN_BYTES], address + at, offset + at

    def _move(self, call: _Call, view: memoryview, address: int, offset: int) -> None:
        """Read or write ``view``, the memory at ``address``, by ``call`` from ``offset`` on."""
        direct = 0 if address % ALIGNMENT else len(view) - len(view) % ALIGNMENT
        direct = direct if self.is_direct else len(view)
        self._complete(call, view[:direct], offset)
        # foreign: threading.local has no attributes in a new thread
        if direct < len(view) and not hasattr(self._local, "memory"):
            # The view does not keep this tensor alive.
            self._local.memory = aligned_empty(_BOUNCE_BYTES)
            self._local.view = bytes_of(self._local.memory)
        for at in range(direct, len(view), _BOUNCE_BYTES):
            part = view[at : at + _BOUNCE_BYTES]
            bounce = self._local.view[: round_up(len(part))]
            if call is os.pwritev:
                bounce[: len(part)] = part
            self._complete(call, bounce, offset + at)
            if call is os.preadv:
                part[:] = bounce[: len(part)]

    def _complete(self, call: _Call, view: memoryview, offset: int) -> None:
        """Repeat ``call``, because one system call may transfer only a part of ``view``."""
        grain = ALIGNMENT if self.is_direct else 1
        done = 0
        while done < len(view):
            moved = call(self._fd, [view[done:]], offset + done)
            if moved < len(view) - done:
                moved -= moved % grain
            if moved <= 0:
                raise OSError(errno.EIO, "the file ends or stops before all bytes were moved")
            done += moved

    @contextmanager
    def _explained(self, action: str, block: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                error.errno,
                f"{error.strerror}: {action} block {block} ({self.block_bytes[block]} bytes at "
                f"offset {self._offsets[block]}). Make room or check the disk (dmesg), then "
                f"load a checkpoint into a new run",
                self.path,
            ) from error
