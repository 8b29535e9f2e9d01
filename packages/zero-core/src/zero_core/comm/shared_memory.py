"""Memory that the ranks of one host read from each other, without a copy through a socket.

Between processes of one machine gloo sends bytes through the loopback interface: two copies in the
kernel, and wake-ups. Here a rank sends its peers only the offset of its bytes, and they read them
in place.

[Note: one window per rank]
Each rank has a **window**: one memfd, an anonymous file that no file system holds and no
``/dev/shm`` limits. It is as large as the host's memory, and costs nothing until it is written to:
pages exist from their first write on. All peers map the whole window when the engine is built,
through ``/proc/PID/fd``; ranks that cannot (another host, user or namespace of processes) share no
memory. Buffers are then carved from the window in order, and an offset in it means the same to
every rank.

The window is **sealed** at its size: no process can shrink it, which would kill all that have it
mapped at their next read (SIGBUS). One without that seal is not mapped.

Each rank has a pipe from every other one, which opens it in the same way: see `Mailbox`.

What is mapped stays readable until the reader drops it. So nobody waits for anybody at the end: a
rank may end, drop its engine or be killed while a slower peer still reads its last gather.
"""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import secrets
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zero_core.comm.control import ControlGroup
from zero_core.comm.mailbox import Mailbox
from zero_core.errors import CollectiveError
from zero_core.watch.beats import process_namespace

if sys.platform == "linux":
    import fcntl

_log = logging.getLogger(__name__)

_NAME = "zero_core"
_SECRET_BYTES = 16
"""Each window begins with its secret, by which peers recognize it."""
_MAX_BYTES_PER_NODE = 2**45
"""Address space that the windows of a node may take in each process, of the 2**47 there are."""


class SharedMemory:
    """This rank's window and the peers' ones. See [Note: one window per rank].

    Attributes:
        peers: the other ranks with which memory is shared, both ways.
        mailbox: short messages from and to them.
    """

    def __init__(
        self, control: ControlGroup, *, timeout_s: float, ranks_per_node: int | None = None
    ) -> None:
        """Map the peers' windows. Every rank must call it.

        Only ranks of one node share: of ``ranks_per_node`` consecutive ones, or of all if None.
        ``timeout_s`` is the longest wait for a message.
        """
        self._rank = control.rank
        self._window: mmap.mmap | None = None
        self._base = 0  # address of the window
        self._nbytes = 0
        self._stop = mmap.PAGESIZE  # of what is carved from it
        self._buffers: list[Tensor] = []  # live as long as this object: peers read them
        self._mapped: dict[int, Tensor] = {}  # whole windows, by rank
        self._found: dict[tuple[int, int, int, torch.dtype], Tensor] = {}  # views of them
        per_node = ranks_per_node or control.world_size
        first = self._rank // per_node * per_node
        others = [rank for rank in range(first, first + per_node) if rank != self._rank]
        self.mailbox = Mailbox(timeout_s)
        secret = secrets.token_bytes(_SECRET_BYTES)
        descriptor = self._open_window(secret, others)
        try:
            place = process_namespace()
            own = [os.getpid(), descriptor, self._nbytes, secret.hex(), place, self.mailbox.ends]
            rows = control.gather_bytes(json.dumps(own).encode())
            cards = [read_card(row, rank) for rank, row in enumerate(rows)]
            for rank, (pid, theirs, nbytes, hidden, where, ends) in enumerate(cards):
                is_near = rank in others and where == place and pid != os.getpid()
                end = ends.get(str(self._rank))
                if is_near and descriptor is not None and theirs is not None and end is not None:
                    window = _map(pid, theirs, nbytes, hidden)
                    if window is not None and self.mailbox.connect(rank, pid, end):
                        self._mapped[rank] = window
            known = json.dumps(sorted(self._mapped)).encode()
            # Once all ranks are here, they have mapped what they can.
            table = [set(_parse(row, rank)) for rank, row in enumerate(control.gather_bytes(known))]
        finally:
            if descriptor is not None:
                os.close(descriptor)
        for rank in list(self._mapped):
            if self._rank not in table[rank]:
                del self._mapped[rank]
        self.peers = frozenset(self._mapped)
        self.mailbox.begin(self.peers)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D tensor in shared memory, which lives as long as this object."""
        start = self._stop
        stop = start + numel * dtype.itemsize
        if self._window is None or stop > self._nbytes:
            raise CollectiveError(
                f"rank {self._rank}: no more shared memory: {numel * dtype.itemsize} bytes asked, "
                f"{max(self._nbytes - start, 0)} left of this host's memory"
            )
        self._stop = -(-max(stop, start + 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        # Each buffer has a storage of its own: whoever saves a tensor saves its storage.
        buffer = torch.frombuffer(self._window, dtype=dtype, count=max(numel, 1), offset=start)
        self._buffers.append(buffer)
        return buffer[:numel]

    def locate(self, tensor: Tensor) -> int | None:
        """Return the offset of ``tensor`` in this rank's window. None if it is not there."""
        offset = tensor.data_ptr() - self._base
        return offset if 0 <= offset < self._nbytes else None

    def at(self, peer: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return ``numel`` elements of rank ``peer``'s window, in place. Not to be written."""
        key = (peer, offset, numel, dtype)
        found = self._found.get(key)
        if found is not None:
            return found
        window = self._mapped[peer]
        is_within = 0 <= offset <= window.numel() - numel * dtype.itemsize
        if not is_within or offset % dtype.itemsize:
            raise CollectiveError(
                f"rank {peer} sent rank {self._rank} the offset {offset} for {numel} elements of "
                f"{dtype}, which are not in its window of {window.numel()} bytes"
            )
        view = self._found[key] = window[offset : offset + numel * dtype.itemsize].view(dtype)
        return view

    def _open_window(self, secret: bytes, others: Sequence[int]) -> int | None:
        """Make this rank's window, and pipes from the ``others`` of its node.

        Returns the window's descriptor, None where there can be none.
        """
        if sys.platform != "linux" or not hasattr(os, "memfd_create"):  # some builds of Python
            return None
        host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        nbytes = min(host_bytes, _MAX_BYTES_PER_NODE // (1 + len(others)))
        descriptor = None
        try:
            self.mailbox.make_pipes(others)
            descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, nbytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            window = mmap.mmap(descriptor, nbytes)
        except OSError as error:
            _log.warning("cannot make shared memory: %s; %s", error, _advice(error))
            if descriptor is not None:
                os.close(descriptor)
            return None
        window[:_SECRET_BYTES] = secret
        self._window, self._nbytes = window, nbytes
        self._base = torch.frombuffer(window, dtype=torch.uint8, count=1).data_ptr()
        return descriptor


_Card = tuple[int, int | None, int, bytes, str, dict[str, int]]


def read_card(row: bytes, rank: int) -> _Card:
    """Parse what ``rank`` sent of itself.

    The process, its window's descriptor, bytes and secret, the namespace, and ends of pipes.
    """
    card = _parse(row, rank)
    kinds = (int, int | None, int, str, str, dict)
    is_card = len(card) == len(kinds) and all(map(isinstance, card, kinds))
    if is_card and not any(isinstance(value, bool) for value in card):
        pid, descriptor, nbytes, secret, place, ends = card
        is_secret = len(secret) == 2 * _SECRET_BYTES and not set(secret) - set("0123456789abcdef")
        are_ends = all(isinstance(end, int) and end >= 0 for end in ends.values())
        if pid > 0 and (descriptor or 0) >= 0 and nbytes >= 0 and is_secret and are_ends:
            return pid, descriptor, nbytes, bytes.fromhex(secret), place, ends
    raise CollectiveError(
        f"rank {rank} sent a wrong description of its shared memory: {row[:80]!r}"
    )


def _parse(row: bytes, rank: int) -> list[Any]:
    try:
        found = json.loads(row)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list):
        raise CollectiveError(f"rank {rank} sent no list about its shared memory: {row[:80]!r}")
    return found


def _advice(error: OSError) -> str:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "this process may open more files after 'ulimit -n 65536'"
    return "what the ranks exchange travels through torch.distributed"


def _map(pid: int, descriptor: int, nbytes: int, secret: bytes) -> Tensor | None:
    """Map another process's window, read-only. None if it cannot be read or is another file."""
    try:
        opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK)
        try:
            is_sealed = fcntl.fcntl(opened, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if os.fstat(opened).st_size != nbytes or not is_sealed:
                return None
            window = mmap.mmap(opened, nbytes, prot=mmap.PROT_READ)
        finally:
            os.close(opened)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # else: not of this host
            _log.warning("cannot share memory with process %d: %s; %s", pid, error, _advice(error))
        return None
    if window[:_SECRET_BYTES] != secret:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no read-only tensors
        return torch.frombuffer(window, dtype=torch.uint8)
