"""Memory that the ranks of one host read from each other, without a copy through a socket.

Between processes of one machine gloo sends bytes through the loopback interface: two copies in the
kernel, and wake-ups. Here a rank tells its peers only where its bytes lie, and they read them
there. The memory is a memfd, an anonymous file that no file system holds and no ``/dev/shm``
limits, and that ends with the processes; peers open it through ``/proc/PID/fd``. Which ranks can do
that with each other (one host, one user, one namespace of processes) is tried out, not guessed.

[Note: reservations]
A rank has a few memfds, each as long as anything it may ever hold, and its peers map all of them
when they meet. Pages take memory only once they are written. So whoever is told of bytes can read
them: also when their rank has freed them meanwhile, or come to the end of its program. A memfd
lives as long as something in it does; allocations have one each while there are any left, so that
parameters that outlive an engine do not keep its gradients.
"""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import secrets
import sys
import threading
import warnings
from pathlib import Path

import torch
from torch import Tensor

from zero_core.collectives import ControlGroup
from zero_core.errors import CollectiveError

__all__ = ["Place", "SharedMemory"]

_log = logging.getLogger(__name__)

_NAME = "zero_core"
_MOST_ADDRESSES = 2**46
"""Bytes of reservations in one process, its own and the peers'; processes have 2^47 or more."""
_MOST_FILES = 256
"""Memfds in one process, its own and the peers': it may often open 1024 files."""
_MOST_RESERVATIONS = 8

Place = tuple[int, int]
"""Where bytes lie in a rank's shared memory: the number of the reservation, the offset in bytes."""


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
        self._lock = threading.Lock()
        self._own: list[_Reservation] = []
        self._num_taken = 0
        self._places: dict[int, Place] = {}  # by address
        self._mapped: dict[int, list[Tensor]] = {}  # by rank
        self.peers: frozenset[int] = frozenset()
        if sys.platform == "linux" and control.world_size > 1:
            self._meet(control, ranks_per_node or control.world_size)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor that peers can read, in ordinary memory if there are none.

        It stays taken as long as this object lives: peers know it.

        Raises:
            CollectiveError: more than a reservation has, twice the host's memory.
        """
        if not self._own:
            return torch.zeros(numel, dtype=dtype)
        with self._lock:
            found = self._own[min(self._num_taken, len(self._own) - 1)].take(numel, dtype)
            self._num_taken += found is not None
        if found is None:
            raise CollectiveError(
                f"rank {self._rank}: no more shared memory: {numel * dtype.itemsize} bytes were "
                f"asked for, which this host does not have"
            )
        return found

    def locate(self, tensor: Tensor) -> Place | None:
        """Where ``tensor`` begins, if it lies in this rank's shared memory."""
        address = tensor.data_ptr()
        place = self._places.get(address)
        if place is None:
            for number, reservation in enumerate(self._own):
                offset = address - reservation.base
                if 0 <= offset < reservation.used:
                    self._places[address] = place = (number, offset)
        return place

    def at(self, peer: int, place: Place, numel: int, dtype: torch.dtype) -> Tensor:
        """``numel`` elements of rank ``peer``, at a place that it has told; not to be written."""
        number, offset = place
        memory = self._mapped[peer][number]
        return memory[offset : offset + numel * dtype.itemsize].view(dtype)

    def _meet(self, control: ControlGroup, per_node: int) -> None:
        """Try to map the memory of every other rank; share with those where it works both ways."""
        secret = secrets.token_hex(16)
        descriptors = self._reserve(per_node)
        try:
            if self._own:
                self.zeros(len(secret), torch.uint8).copy_(_bytes_of(secret))
                self._num_taken = 0  # what follows has that reservation
            card = [os.getpid(), descriptors, secret, _namespace()]
            cards = [json.loads(row) for row in control.gather_bytes(json.dumps(card).encode())]
            for rank, (pid, numbers, hidden, namespace) in enumerate(cards):
                is_of_node = rank // per_node == self._rank // per_node and namespace == card[-1]
                if is_of_node and pid != os.getpid() and numbers and self._own:
                    memory = _map(pid, numbers, hidden)
                    if memory is not None:
                        self._mapped[rank] = memory
            known = json.dumps(sorted(self._mapped)).encode()
            table = [json.loads(row) for row in control.gather_bytes(known)]
        finally:
            for descriptor in descriptors:  # everybody has mapped what it can
                os.close(descriptor)
        self.peers = frozenset(rank for rank in self._mapped if self._rank in table[rank])

    def _reserve(self, num_ranks: int) -> list[int]:
        """Map this rank's memory; its memfds, none if the system does not allow it."""
        count = max(1, min(_MOST_RESERVATIONS, _MOST_FILES // num_ranks))
        host_pages = os.sysconf("SC_PHYS_PAGES")
        num_pages = min(2 * host_pages, _MOST_ADDRESSES // (count * num_ranks) // mmap.PAGESIZE)
        descriptors: list[int] = []
        try:
            for _ in range(count):
                descriptors.append(os.memfd_create(_NAME))
                os.ftruncate(descriptors[-1], num_pages * mmap.PAGESIZE)
                self._own.append(_Reservation(mmap.mmap(descriptors[-1], 0)))
        except OSError as error:
            _tell(error)
            self._own.clear()
            for descriptor in descriptors:
                os.close(descriptor)
            return []
        return descriptors


class _Reservation:
    """One memfd of this rank.

    Attributes:
        base: its address.
        used: how many of its bytes are taken, from the start.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.base = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        self.used = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """The next bytes, from a page's start on; None if there are not so many."""
        count = max(numel, 1)
        num_pages = -(-count * dtype.itemsize // mmap.PAGESIZE)
        start, stop = self.used, self.used + num_pages * mmap.PAGESIZE
        if stop > len(self._memory):
            return None
        self.used = stop
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)[:numel]


def _map(pid: int, descriptors: list[int], secret: str) -> list[Tensor] | None:
    """Another process's memfds, read-only, as bytes; None if they cannot be read or are others."""
    found = []
    try:
        for descriptor in descriptors:
            path = f"/proc/{pid}/fd/{descriptor}"
            if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
                return None
            opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                found.append(mmap.mmap(opened, 0, prot=mmap.PROT_READ))
            finally:
                os.close(opened)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # else: not of this host
            _tell(error)
        return None
    if found[0][: len(secret)] != secret.encode():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no read-only tensors
        return [torch.frombuffer(memory, dtype=torch.uint8) for memory in found]


def _tell(error: OSError) -> None:
    advice = ""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        advice = "; this process may open more files after 'ulimit -n 65536'"
    if error.errno == errno.ENOMEM:
        advice = "; it takes addresses, not memory: allow them by 'ulimit -v unlimited'"
    _log.warning(
        "no memory is shared with other ranks of this node, what they exchange travels through "
        "torch.distributed, which is slower: %s%s",
        error,
        advice,
    )


def _bytes_of(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _namespace() -> str:
    """What processes must have in common for their numbers to mean the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
