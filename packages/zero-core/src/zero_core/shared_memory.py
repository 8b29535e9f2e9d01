"""Memory that the ranks of one host read from each other, without a copy through a socket.

Between processes of one machine gloo sends bytes through the loopback interface: two copies in the
kernel, and wake-ups. Here a rank tells its peers only where its bytes lie, and they read them
there. The memory is a memfd, an anonymous file that no file system holds and no ``/dev/shm``
limits, and that ends with the processes; peers open it through ``/proc/PID/fd``. Which ranks can do
that with each other (one host, one user, one namespace of processes) is tried out, not guessed.

[Note: who has looked]
A peer opens a memfd when it first reads from it, which may be late: in the last gather of a program
its owner may be done long before. What is mapped stays readable, so the owner must only not free
its memory, or end, before that. Every rank counts on a page that all its peers have mapped how many
memfds it has opened, or tried to, of each of them. An owner that ends waits until each peer has
opened as many as it was told of; or has ended, or says on its page that it will not look any more.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import mmap
import multiprocessing.util
import os
import secrets
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from zero_core.collectives import ControlGroup
from zero_core.errors import CollectiveError

__all__ = ["Place", "SharedMemory"]

_log = logging.getLogger(__name__)

_NAME = "zero_core"
_SECRET_BYTES = 16
"""How a page begins; its counts follow, 8 bytes each."""
_NO_MORE = 2**62
"""The count of a rank that has ended."""
_PATIENCE_S = 60.0
"""How long an end waits for a peer that is alive and does not look: it may have failed."""
_MOST_DESCRIPTORS = 2**24
_serials = itertools.count()

_Counts: TypeAlias = "memoryview[int]"  # of int64
Place = tuple[int, int]
"""Where bytes lie in a rank's shared memory: the number of the memfd, the offset in bytes. Numbers
do not come again, as those of descriptors do: the serial number, and the descriptor in the last 24
bits."""


class SharedMemory:
    """Allocates this rank's shared memory and maps that of the peers.

    Attributes:
        peers: the other ranks with which memory is shared, both ways.
    """

    def __init__(self, control: ControlGroup, *, ranks_per_node: int | None = None) -> None:
        """Find out who shares; every rank must call it.

        Only ranks of one node do: of ``ranks_per_node`` consecutive ones, or of all if None.
        """
        self._rank = control.rank
        self._own = _Own(control.rank)
        weakref.finalize(self, _end, self._own).atexit = False  # then all end at once
        self._places: dict[int, Place] = {}  # by address
        self._mapped: dict[tuple[int, int], Tensor] = {}  # by rank and number of the memfd
        self._lock = threading.Lock()
        self.peers: frozenset[int] = frozenset()
        per_node = ranks_per_node or control.world_size
        if per_node > 1:
            self._meet(control, per_node)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor in shared memory, which lives as long as this object: peers know it.

        Raises:
            CollectiveError: no file descriptor or memory is left.
        """
        nbytes = max(numel, 1) * dtype.itemsize
        try:
            number, memory = self._own.make(nbytes)
        except OSError as error:
            raise CollectiveError(
                f"rank {self._rank}: no more shared memory: {error}; {_advice(error)}"
            ) from error
        buffer = torch.frombuffer(memory, dtype=dtype)
        self._own.buffers.append((buffer, number))
        return buffer[:numel]

    def locate(self, tensor: Tensor) -> Place | None:
        """Where ``tensor`` begins, if it lies in this rank's shared memory."""
        address = tensor.data_ptr()
        place = self._places.get(address)
        if place is None:
            for buffer, number in self._own.buffers:
                offset = address - buffer.data_ptr()
                if 0 <= offset < buffer.nbytes:
                    self._places[address] = place = (number, offset)
        return place

    def tell(self, peer: int, place: Place) -> None:
        """Take note that rank ``peer`` is told of a place, and may look at it from now on."""
        self._own.told.setdefault(peer, set()).add(place[0])

    def at(self, peer: int, place: Place, numel: int, dtype: torch.dtype) -> Tensor:
        """``numel`` elements of rank ``peer``, at a place that it has told; not to be written.

        Raises:
            CollectiveError: the peer has ended before its memory was looked at.
        """
        number, offset = place
        stop = offset + numel * dtype.itemsize
        memory = self._mapped.get((peer, number))
        if memory is None:
            with self._lock:
                memory = self._mapped.get((peer, number))
                if memory is None:
                    memory = self._look(peer, number, stop)
        return memory[offset:stop].view(dtype)

    def _look(self, peer: int, number: int, nbytes: int) -> Tensor:
        pid = self._own.pids[peer]
        try:
            memory = _map(pid, number, nbytes)
        except OSError as error:
            raise CollectiveError(
                f"rank {self._rank}: cannot read the memory of rank {peer} (process {pid}): "
                f"{error}; {_advice(error)}"
            ) from error
        finally:
            self._own.count_look(peer)
        found = self._mapped[peer, number] = _as_bytes(memory)
        return found

    def _meet(self, control: ControlGroup, per_node: int) -> None:
        """Try to map a page of every other rank; share with those where it works both ways."""
        secret = secrets.token_bytes(_SECRET_BYTES)
        own = self._own
        number = own.make_page(secret, control.world_size)
        card = json.dumps([os.getpid(), number, secret.hex(), _namespace()]).encode()
        cards = [json.loads(row) for row in control.gather_bytes(card)]
        own.pids += [pid for pid, *_ in cards]
        place, node = _namespace(), self._rank // per_node
        for rank, (pid, of_page, hidden, where) in enumerate(cards):
            is_near = rank // per_node == node and where == place and pid != os.getpid()
            if is_near and of_page is not None and number is not None:
                page = _page_of(pid, of_page, bytes.fromhex(hidden), control.world_size)
                if page is not None:
                    own.pages[rank] = page
        known = json.dumps(sorted(own.pages)).encode()
        table = [json.loads(row) for row in control.gather_bytes(known)]
        for rank in list(own.pages):
            if self._rank not in table[rank]:
                del own.pages[rank]
        self.peers = frozenset(own.pages)


class _Own:
    """What a rank has shared: more than `SharedMemory` lives, until others have looked.

    Attributes:
        buffers: memory, with the numbers of the memfds.
        told: numbers of memfds, by the rank that was told of them.
        pages: of every peer, by rank.
        pids: of all ranks.
    """

    def __init__(self, rank: int) -> None:
        self.buffers: list[tuple[Tensor, int]] = []
        self.told: dict[int, set[int]] = {}
        self.pages: dict[int, _Counts] = {}
        self.pids: list[int] = []
        self._rank = rank
        self._page: _Counts | None = None
        self._descriptors: list[int] = []
        self._pid = os.getpid()

    def make(self, nbytes: int) -> tuple[int, mmap.mmap]:
        """A memfd's number and memory."""
        serial = next(_serials)
        descriptor = os.memfd_create(f"{_NAME}-{serial}")
        self._descriptors.append(descriptor)
        os.ftruncate(descriptor, nbytes)
        return serial * _MOST_DESCRIPTORS + descriptor, mmap.mmap(descriptor, nbytes)

    def make_page(self, secret: bytes, world_size: int) -> int | None:
        """See [Note: who has looked]; the number of its memfd, None where there are none."""
        if sys.platform != "linux" or not hasattr(os, "memfd_create"):  # some builds of Python
            return None
        number, memory = self.make(_SECRET_BYTES + 8 * world_size)
        memory[:_SECRET_BYTES] = secret
        self._page = _counts(memory)
        _live.add(self)
        _end_with_process()
        return number

    def count_look(self, peer: int) -> None:
        """One more memfd of that rank was looked at, or tried to."""
        assert self._page is not None
        self._page[peer] += 1

    def look_no_more(self) -> None:
        """Tell those who wait for this rank."""
        if self._page is not None and os.getpid() == self._pid:
            for peer in range(len(self._page)):
                self._page[peer] = _NO_MORE

    def end(self, limit: float) -> None:
        """Wait as [Note: who has looked] says, then close the memfds: what is mapped stays."""
        _live.discard(self)
        try:
            # A process forked from this one may end when it likes.
            for peer, numbers in list(self.told.items()) if os.getpid() == self._pid else ():
                self._await_look(peer, len(numbers), limit)
        finally:
            self.told.clear()
            while self._descriptors:
                os.close(self._descriptors.pop())

    def _await_look(self, peer: int, count: int, limit: float) -> None:
        while self.pages[peer][self._rank] < count and _is_alive(self.pids[peer]):
            if time.monotonic() > limit:
                _log.warning(
                    "rank %d ends, and rank %d has not read for %.0f s what it was sent: it will "
                    "not find it any more",
                    self._rank,
                    peer,
                    _PATIENCE_S,
                )
                return
            time.sleep(0.001)


_live: set[_Own] = set()
_ends_with_process: set[int] = set()
"""Processes, as `_end_all` is of no use to one that was forked from this one."""


def _end(own: _Own) -> None:
    own.look_no_more()
    own.end(time.monotonic() + _PATIENCE_S)


def _end_all() -> None:
    """At the end of the process. All say first that they look no more, so that none waits for one
    that waits, too."""
    limit = time.monotonic() + _PATIENCE_S
    for own in list(_live):
        own.look_no_more()
    for own in list(_live):
        own.end(limit)


def _end_with_process() -> None:
    """By multiprocessing's own exit function, which those run, too, that it has forked: they end
    without `atexit`."""
    if os.getpid() not in _ends_with_process:
        _ends_with_process.add(os.getpid())
        multiprocessing.util.Finalize(None, _end_all, exitpriority=0)


def _advice(error: OSError) -> str:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "this process may open more files after 'ulimit -n 65536'"
    return "the other process has probably ended, or memory has"


def _open(pid: int, number: int, nbytes: int) -> int:
    """A process's memfd, opened for reading; OSError if there is none of that size."""
    serial, descriptor = divmod(number, _MOST_DESCRIPTORS)
    path = f"/proc/{pid}/fd/{descriptor}"
    if os.readlink(path) != f"/memfd:{_NAME}-{serial} (deleted)":
        raise OSError(errno.ENOENT, "that is another file by now", path)
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if os.fstat(opened).st_size < nbytes:
        os.close(opened)
        raise OSError(errno.ENOENT, "that is another memory by now", path)
    return opened


def _map(pid: int, number: int, nbytes: int) -> mmap.mmap:
    """A process's memfd, read-only."""
    opened = _open(pid, number, nbytes)
    try:
        return mmap.mmap(opened, 0, prot=mmap.PROT_READ)
    finally:
        os.close(opened)


def _as_bytes(memory: mmap.mmap) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no read-only tensors
        return torch.frombuffer(memory, dtype=torch.uint8)


def _counts(memory: mmap.mmap) -> _Counts:
    """Those of a page."""
    return memoryview(memory)[_SECRET_BYTES:].cast("q")


def _page_of(pid: int, number: int, secret: bytes, world_size: int) -> _Counts | None:
    """Another process's counts; None if they cannot be read, or are not what they were said to
    be."""
    try:
        memory = _map(pid, number, _SECRET_BYTES + 8 * world_size)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # else: not of this host
            _log.warning("cannot share memory with process %d: %s; %s", pid, error, _advice(error))
        return None
    return _counts(memory) if memory[:_SECRET_BYTES] == secret else None


def _is_alive(pid: int) -> bool:
    """Whether the process is there, and not merely its exit code."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] not in ("Z", "X")


def _namespace() -> str:
    """What processes must have in common for their numbers to mean the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
