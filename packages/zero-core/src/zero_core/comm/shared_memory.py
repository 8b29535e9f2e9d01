"""Memory that the ranks of one host read from each other, and short messages between them.

Between processes of one machine gloo sends bytes through the loopback interface: two copies in the
kernel, and wake-ups. Here a rank sends its peers only the offset of its bytes, and they read them
in place.

[Note: one window per rank]
Each rank has a **window**: one memfd, an anonymous file that no file system holds and no
``/dev/shm`` limits. It is as large as the host's memory, and its pages exist from their first write
on. All peers map the whole window when the engine is built, through ``/proc/PID/fd``; ranks that
cannot (another host, user or namespace of processes) share no memory. Buffers are carved from the
window in order, and an offset in it means the same to every rank.

The window is **sealed** at its size: shrinking it would kill all that have it mapped at their next
read (SIGBUS). What is mapped stays readable until the reader drops it. So a rank may end, drop its
engine or be killed while a slower peer still reads its last gather.

[Note: pipes]
Each rank has a pipe from every other one, which opens it in the same way. A message is one write of
two numbers with its tag and its number among those of its sender and tag. So each letter gets its
own message, whoever reads it from the pipe, in whatever order the letters are waited for. The end
of a pipe shows that its writer died. (By gloo, whose thread polls for the lock of a connection, a
message took a tick of the scheduler, 4 ms, where ranks have one core each.)

[Note: interrupts]
Ctrl-C raises between two calls in the main thread. What is read from a pipe is therefore kept by
the same call in C, and sorted in steps that may be repeated. A reader that was interrupted finds
its own mark and goes on; others wait for it.
"""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import secrets
import select
import stat
import struct
import sys
import time
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, count, repeat
from threading import Condition, RLock, get_ident
from typing import Annotated

import torch
from pydantic import Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from torch import Tensor

from zero_core.comm.control import ControlGroup
from zero_core.errors import CollectiveError
from zero_core.watch.watch import process_namespace

if sys.platform == "linux":
    import fcntl

_log = logging.getLogger(__name__)

_SECRET_BYTES = 16
"""Each window begins with its secret, by which peers recognize it."""
_MAX_BYTES_PER_NODE = 2**45
"""Address space that the windows of a node may take in each process, of the 2**47 there are."""

Letter = tuple[int, int, int]
"""A message that is expected: its peer, tag and number."""
_MESSAGE = struct.Struct("=qqqq")
"""Tag, number, and what it says. Below ``PIPE_BUF``: written at once or not at all."""
_MAX_READ = 2048 * _MESSAGE.size
_FULL_S = 0.01
"""Longest time between two tries to write to a full pipe."""
_MAX_POLL_S = 3600.0

_Secret = Annotated[str, Field(pattern=f"^[0-9a-f]{{{2 * _SECRET_BYTES}}}$")]
_Card = tuple[
    PositiveInt, NonNegativeInt | None, NonNegativeInt, _Secret, str, dict[str, NonNegativeInt]
]
"""A rank's process, its window's descriptor, bytes and secret, its namespace, and ends of pipes."""
_CARD: TypeAdapter[_Card] = TypeAdapter(_Card)


class SharedMemory:
    """This rank's window and the peers' ones. See [Note: one window per rank]."""

    def __init__(
        self, control: ControlGroup, *, timeout_s: float, ranks_per_node: int | None = None
    ) -> None:
        """Map the windows of the node's ``ranks_per_node`` ranks, of all by default.

        Every rank must call it. ``timeout_s`` is the longest wait for a message.
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
                    window = _map(pid, theirs, nbytes, bytes.fromhex(hidden))
                    if window is not None and self.mailbox.connect(rank, pid, end):
                        self._mapped[rank] = window
            # Once all ranks are here, they have mapped what they can.
            table = control.gather_bytes(bytes(r in self._mapped for r in range(len(cards))))
        finally:
            if descriptor is not None:
                os.close(descriptor)
        self._mapped = {r: window for r, window in self._mapped.items() if table[r][self._rank]}
        self.peers = frozenset(self._mapped)  # with which memory is shared, both ways
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

    def receive(self, letter: Letter, like: Tensor) -> Tensor:
        """Wait for a letter, and return the bytes that it locates, in place, as ``like`` is."""
        peer = letter[0]
        offset, nbytes = self.mailbox.wait(letter)
        if nbytes != like.nbytes:
            raise CollectiveError(
                f"rank {self._rank} expects {like.nbytes} bytes of rank {peer}, which has "
                f"{nbytes}: the ranks exchange different dtypes or units"
            )
        return self.at(peer, offset, like.numel(), like.dtype)

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
        """Make this rank's window, if possible, and pipes from others. Return its descriptor."""
        if sys.platform != "linux" or not hasattr(os, "memfd_create"):  # some builds of Python
            return None
        host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        nbytes = min(host_bytes, _MAX_BYTES_PER_NODE // (1 + len(others)))
        descriptor = None
        try:
            self.mailbox.make_pipes(others)
            descriptor = os.memfd_create("zero_core", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
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


def read_card(row: bytes, rank: int) -> _Card:
    try:
        return _CARD.validate_json(row, strict=True)
    except ValidationError:
        raise CollectiveError(
            f"rank {rank} sent a wrong description of its shared memory: {row[:80]!r}"
        ) from None


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


class Mailbox:
    """This rank's messages from and to its peers, by any thread. See [Note: pipes]."""

    def __init__(self, timeout_s: float) -> None:
        """Make it without peers. ``timeout_s`` is the longest wait for one."""
        self._timeout_s = timeout_s
        self._descriptors: set[int] = set()
        weakref.finalize(self, _close, self._descriptors)
        _mailboxes.add(self)
        self.ends: dict[int, int] = {}  # what peers open to write to this rank, until `begin`
        self._writers: dict[int, int] = {}
        self._peer_of: dict[int, int] = {}  # by the end that this rank reads
        self._poll: select.poll  # of the readers; Windows has none
        self._sent: defaultdict[tuple[int, int], count[int]] = defaultdict(count)
        self._expected: defaultdict[tuple[int, int], count[int]] = defaultdict(count)
        self._raw: deque[tuple[int, tuple[int, int, int, int]]] = deque()  # read, not sorted
        self._lock = RLock()  # of all that follows; `Condition.__enter__` could be interrupted
        self._changed = Condition(self._lock)
        self._reader: int | None = None  # the one thread that reads
        self._ended: set[int] = set()  # peers
        self._contents: dict[Letter, tuple[int, int]] = {}

    def make_pipes(self, peers: Iterable[int]) -> None:
        """Make the pipes that ``peers`` write to. Raise OSError where that is not possible."""
        self._poll = select.poll()
        for peer in peers:
            reader, self.ends[peer] = pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._peer_of[reader] = peer
            self._descriptors.update(pipe)

    def connect(self, peer: int, pid: int, end: int) -> bool:
        """Open the pipe to ``peer``: the ``end`` of its process. Return whether that worked."""
        try:
            writer = os.open(f"/proc/{pid}/fd/{end}", os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                _log.warning("cannot reach process %d by a pipe: %s", pid, error)
            return False
        self._descriptors.add(writer)
        self._writers[peer] = writer
        return stat.S_ISFIFO(os.fstat(writer).st_mode)  # else the peer has failed since

    def begin(self, peers: Collection[int]) -> None:
        """Close all but the pipes from and to ``peers``, which have connected."""
        self.ends.clear()
        self._writers = {peer: end for peer, end in self._writers.items() if peer in peers}
        self._peer_of = {end: peer for end, peer in self._peer_of.items() if peer in peers}
        kept = {*self._writers.values(), *self._peer_of}
        _close(self._descriptors - kept)
        self._descriptors &= kept
        for reader in self._peer_of:
            self._poll.register(reader, select.POLLIN)

    def post(self, peer: int, tag: int, first: int, second: int) -> None:
        """Send a message. One to a peer that has ended is lost."""
        message, deadline = _MESSAGE.pack(tag, next(self._sent[peer, tag]), first, second), None
        while True:
            try:
                os.write(self._writers[peer], message)
                return
            except BrokenPipeError:
                return
            except BlockingIOError:  # it is full: the peer may be waiting for this rank likewise
                deadline = deadline or time.monotonic() + self._timeout_s
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"rank {peer} has read no message for {self._timeout_s:g} s"
                    ) from None
                with self._lock:
                    may_read = self._become_reader(_FULL_S)
                if may_read:
                    self._read(_FULL_S)

    def expect(self, peer: int, tag: int) -> Letter:
        """Return a letter for the next message of ``peer`` with ``tag``."""
        return peer, tag, next(self._expected[peer, tag])

    def wait(self, letter: Letter) -> tuple[int, int]:
        """Wait for a letter, and return its numbers. Once."""
        peer, deadline = letter[0], None
        while True:
            with self._lock:
                self._sort()
                found = self._contents.pop(letter, None)
                if found is not None:
                    return found
                if peer in self._ended:
                    raise RuntimeError(
                        f"Connection closed by peer: rank {peer} ended or dropped its engine"
                    )
                now = time.monotonic()
                deadline = deadline or now + self._timeout_s
                if now >= deadline:
                    raise RuntimeError(
                        f"Timed out: no message of rank {peer} for {self._timeout_s:g} s"
                    )
                may_read = self._become_reader(deadline - now)
            if may_read:
                self._read(min(deadline - now, _MAX_POLL_S))

    def _become_reader(self, seconds: float) -> bool:
        """Return whether this thread is to read. If another one is, wait until it has read."""
        if self._reader in (None, get_ident()):
            self._reader = get_ident()
            return True
        self._changed.wait(seconds)
        return False

    def _read(self, seconds: float) -> None:
        """Read and sort what has arrived, or arrives first within ``seconds``."""
        try:
            for descriptor, event in self._poll.poll(seconds * 1000):
                peer = self._peer_of[descriptor]
                if event & select.POLLIN:
                    data = map(os.read, (descriptor,), (_MAX_READ,))
                    messages = chain.from_iterable(map(_MESSAGE.iter_unpack, data))
                    self._raw.extend(zip(repeat(peer), messages))  # see [Note: interrupts]
                else:
                    self._poll.unregister(descriptor)
                    with self._lock:
                        self._ended.add(peer)
        finally:
            with self._lock:
                self._sort()
                self._reader = None
                self._changed.notify_all()

    def _sort(self) -> None:
        while self._raw:
            peer, (tag, number, first, second) = self._raw[0]
            self._contents[peer, tag, number] = first, second
            self._raw.popleft()


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


_mailboxes = weakref.WeakSet[Mailbox]()


def _forked() -> None:
    """Close the pipes in a child of this process, or peers would not see the process end."""
    for mailbox in list(_mailboxes):
        _close(mailbox._descriptors)
        mailbox._descriptors.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forked)
