"""Memory that the ranks of one host read from each other, without a copy through a socket.

Between processes of one machine gloo sends bytes through the loopback interface: two copies in the
kernel, and wake-ups. Here a rank tells its peers only where its bytes lie, and they read them
there. The memory is a memfd, an anonymous file that no file system holds and no ``/dev/shm``
limits, and that ends with the processes; peers open it through ``/proc/PID/fd``. Which ranks can do
that with each other (one host, one user, one namespace of processes) is tried out, not guessed.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import secrets
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor

from zero_core.collectives import ControlGroup
from zero_core.errors import CollectiveError

__all__ = ["Place", "SharedMemory"]

_NAME = "zero_core"

Place = tuple[int, int]
"""Where bytes lie in a rank's shared memory: the number of the memfd, the offset in bytes."""


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
        self._buffers: list[tuple[Tensor, int]] = []  # with the number of the memfd
        self._places: dict[int, Place] = {}  # by address
        self._mapped: dict[tuple[int, int], Tensor] = {}  # by rank and number of the memfd
        self._pids: list[int] = []
        self.peers: frozenset[int] = frozenset()
        if sys.platform == "linux" and control.world_size > 1:
            self._meet(control, ranks_per_node or control.world_size)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor in shared memory, which lives as long as this object: peers know it.

        Raises:
            CollectiveError: no file descriptor or memory is left.
        """
        nbytes = max(numel, 1) * dtype.itemsize
        try:
            descriptor = os.memfd_create(_NAME)
        except OSError as error:
            raise CollectiveError(
                f"rank {self._rank}: no more shared memory: {error}; {_advice(error)}"
            ) from error
        os.ftruncate(descriptor, nbytes)
        buffer = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=dtype)
        self._buffers.append((buffer, descriptor))
        return buffer[:numel]

    def locate(self, tensor: Tensor) -> Place | None:
        """Where ``tensor`` begins, if it lies in this rank's shared memory."""
        address = tensor.data_ptr()
        place = self._places.get(address)
        if place is None:
            for buffer, descriptor in self._buffers:
                offset = address - buffer.data_ptr()
                if 0 <= offset < buffer.nbytes:
                    self._places[address] = place = (descriptor, offset)
        return place

    def at(self, peer: int, place: Place, numel: int, dtype: torch.dtype) -> Tensor:
        """``numel`` elements of rank ``peer``, at a place that it has told; not to be written.

        Raises:
            CollectiveError: the peer has ended before its memory was looked at.
        """
        descriptor, offset = place
        memory = self._mapped.get((peer, descriptor))
        if memory is None:
            try:
                memory = _map(self._pids[peer], descriptor, offset + numel * dtype.itemsize)
            except OSError as error:
                raise CollectiveError(
                    f"rank {self._rank}: cannot read the memory of rank {peer} (process "
                    f"{self._pids[peer]}): {error}; {_advice(error)}"
                ) from error
            self._mapped[peer, descriptor] = memory
        return memory[offset : offset + numel * dtype.itemsize].view(dtype)

    def __del__(self) -> None:
        for _, descriptor in self._buffers:  # what is mapped stays mapped
            os.close(descriptor)

    def _meet(self, control: ControlGroup, per_node: int) -> None:
        """Try to read a secret of every other rank; share with those where it works both ways."""
        secret = secrets.token_hex(16)
        probe = self.zeros(len(secret), torch.uint8)
        probe.copy_(torch.frombuffer(bytearray(secret.encode()), dtype=torch.uint8))
        (_, descriptor), *_ = self._buffers
        card = json.dumps([os.getpid(), descriptor, secret, _namespace()]).encode()
        cards = [json.loads(row) for row in control.gather_bytes(card)]
        self._pids = [pid for pid, *_ in cards]
        own, node = _namespace(), self._rank // per_node
        is_read = [
            rank // per_node == node and place == own and _reads(pid, number, hidden)
            for rank, (pid, number, hidden, place) in enumerate(cards)
        ]
        table = [json.loads(row) for row in control.gather_bytes(json.dumps(is_read).encode())]
        others = (rank for rank in range(control.world_size) if rank != control.rank)
        self.peers = frozenset(r for r in others if is_read[r] and table[r][control.rank])


def _advice(error: OSError) -> str:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "this process may open more files after 'ulimit -n 65536'"
    return "the other process has probably ended, or memory has"


def _open(pid: int, descriptor: int, nbytes: int) -> int:
    """A process's memfd, opened for reading; OSError if there is none of that size."""
    path = f"/proc/{pid}/fd/{descriptor}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise OSError(errno.ENOENT, "that is another file by now", path)
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if os.fstat(opened).st_size < nbytes:
        os.close(opened)
        raise OSError(errno.ENOENT, "that is another memory by now", path)
    return opened


def _map(pid: int, descriptor: int, nbytes: int) -> Tensor:
    """A process's memfd, read-only, as bytes."""
    opened = _open(pid, descriptor, nbytes)
    try:
        mapped = mmap.mmap(opened, 0, prot=mmap.PROT_READ)
    finally:
        os.close(opened)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no read-only tensors
        return torch.frombuffer(mapped, dtype=torch.uint8)


def _reads(pid: int, descriptor: int, secret: str) -> bool:
    if pid == os.getpid():
        return False  # not another process: nobody reads it when it waits
    try:
        opened = _open(pid, descriptor, len(secret))
    except OSError:
        return False
    try:
        return os.read(opened, len(secret)) == secret.encode()
    finally:
        os.close(opened)


def _namespace() -> str:
    """What processes must have in common for their numbers to mean the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
