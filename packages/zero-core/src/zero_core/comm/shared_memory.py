"""Memory of one rank that other ranks of the host can read, and short messages between them.

Between processes of one host, gloo sends bytes through the loopback interface, with two copies in
the kernel and wake-ups. With this module a rank sends only the offset and size of its bytes, and
its peers read them in place.

[Note: one window per rank]
Each rank has a **window**: a memfd, an anonymous file outside any file system and not limited by
``/dev/shm``. The window is at most as large as the host's memory, and its pages are allocated at
their first write. When the engine is built, all peers on the node map the whole window through
``/proc/PID/fd``. Ranks that cannot map it (another host, user or PID namespace) do not use it.
Buffers are allocated from the window in ascending order.

The window is **sealed** at its size, because shrinking it would kill every process that reads it
afterwards (SIGBUS). Mapped pages stay readable until the reader unmaps them. A rank may therefore
exit, drop its engine or be killed while a slower peer still reads its last gather.

[Note: pipes]
Each rank has one pipe per peer, which the peer opens through ``/proc/PID/fd`` for writing. A
message is a single write of its tag, two numbers, and a serial number among the messages with the
same sender and tag. Messages can therefore be awaited in any order and read from the pipe by any
thread. End of file on a pipe means that its writer has exited or dropped its engine. (gloo's thread
polls for the lock of a connection, so a message may take a scheduler tick if a rank has one core.)

[Note: interrupts]
Ctrl-C raises KeyboardInterrupt between bytecode instructions of the main thread. Data read from a
pipe is therefore stored by the same C call that reads it, and sorted in steps that can be repeated.
A reader's registration ends in a ``finally`` that calls nothing before it has ended it, so that no
interrupt can skip it. The call that wakes the other threads may be skipped: they look again after
``_RECHECK_S`` at the latest.
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
from zero_core.comm.watch import process_namespace
from zero_core.errors import CollectiveError

if sys.platform == "linux":
    import fcntl

_log = logging.getLogger(__name__)

_SECRET_BYTES = 16
"""Length of the secret at the start of each window, by which peers recognize the window."""
_MAX_BYTES_PER_NODE = 2**45
"""Limit of the address space for a node's windows. An x86-64 process has 2**47 bytes of it."""

Letter = tuple[int, int, int]
"""An expected message: peer, tag and serial number."""
_MESSAGE = struct.Struct("=qqqq")
"""Tag, serial number and two numbers. Shorter than ``PIPE_BUF``, so a write is atomic."""
_MAX_READ = 2048 * _MESSAGE.size
_FULL_S = 0.01
"""Longest wait in seconds between two attempts to write to a full pipe."""
_MAX_POLL_S = 3600.0
_RECHECK_S = 0.5
"""Longest wait in seconds for another thread that reads: see [Note: interrupts]."""

_Secret = Annotated[str, Field(pattern=f"^[0-9a-f]{{{2 * _SECRET_BYTES}}}$")]
_Card = tuple[
    PositiveInt, NonNegativeInt | None, NonNegativeInt, _Secret, str, dict[str, NonNegativeInt]
]
"""A rank's process id, its window's descriptor, size and secret, its PID namespace, and the write
ends of its pipes by peer."""
_CARD: TypeAdapter[_Card] = TypeAdapter(_Card)


class SharedMemory:
    """This rank's window and its mappings of the peers' windows."""

    def __init__(
        self, control: ControlGroup, *, timeout_s: float, ranks_per_node: int | None = None
    ) -> None:
        """Create a window, and map the windows of the node's ranks (``ranks_per_node``, or all).

        Every rank must call it. ``timeout_s`` limits each wait for a message.
        """
        self._rank = control.rank
        self._window: mmap.mmap | None = None
        self._base = 0  # address of the window
        self._nbytes = 0
        self._stop = mmap.PAGESIZE  # end of the allocated part of the window
        self._buffers: list[Tensor] = []  # kept alive by this object, because peers read them
        self._mapped: dict[int, Tensor] = {}  # peers' whole windows as uint8, by rank
        self._found: dict[tuple[int, int, int, torch.dtype], Tensor] = {}  # cache of `at`
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
            # After this exchange the descriptor can be closed: no peer will open the window again.
            table = control.gather_bytes(bytes(r in self._mapped for r in range(len(cards))))
        finally:
            if descriptor is not None:
                os.close(descriptor)
        self._mapped = {r: window for r, window in self._mapped.items() if table[r][self._rank]}
        self.peers = frozenset(self._mapped)  # they map this window, and this rank theirs
        self.mailbox.begin(self.peers)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate 1-D zeros in the window. Raises CollectiveError if too little memory is left."""
        start = self._stop
        stop = start + numel * dtype.itemsize
        if self._window is None or stop > self._nbytes:
            raise CollectiveError(
                f"rank {self._rank}: no more shared memory: {numel * dtype.itemsize} bytes asked, "
                f"{max(self._nbytes - start, 0)} left of this host's memory"
            )
        self._stop = -(-max(stop, start + 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        # One storage per buffer, because `torch.save` saves the whole storage of a tensor.
        buffer = torch.frombuffer(self._window, dtype=dtype, count=max(numel, 1), offset=start)
        self._buffers.append(buffer)
        return buffer[:numel]

    def locate(self, tensor: Tensor) -> int | None:
        """Return the byte offset of ``tensor`` in this rank's window, or None if it is outside."""
        offset = tensor.data_ptr() - self._base
        return offset if 0 <= offset < self._nbytes else None

    def receive(self, letter: Letter, like: Tensor) -> Tensor:
        """Wait for ``letter``. Return a view of the peer's bytes, with the dtype of ``like``."""
        peer = letter[0]
        offset, nbytes = self.mailbox.wait(letter)
        if nbytes != like.nbytes:
            raise CollectiveError(
                f"rank {self._rank} expects {like.nbytes} bytes of rank {peer}, which has "
                f"{nbytes}: the ranks exchange different dtypes or units"
            )
        return self.at(peer, offset, like.numel(), like.dtype)

    def at(self, peer: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a view of rank ``peer``'s window at byte ``offset``. Callers only read it."""
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
        """Create this rank's pipes and window. Return the window's descriptor, None on failure."""
        if sys.platform != "linux" or not hasattr(os, "memfd_create"):  # some builds lack it
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
    """Map a window of another process read-only. Returns None if that is not possible."""
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
        # Other errors are expected if the process belongs to another host or user.
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            _log.warning("cannot share memory with process %d: %s; %s", pid, error, _advice(error))
        return None
    if window[:_SECRET_BYTES] != secret:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns because it has no read-only tensors
        return torch.frombuffer(window, dtype=torch.uint8)


class Mailbox:
    """Messages between this rank and its peers, usable from any thread. See [Note: pipes]."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._descriptors: set[int] = set()
        weakref.finalize(self, _close, self._descriptors)
        _mailboxes.add(self)
        self.ends: dict[int, int] = {}  # by peer: write ends for the peers to open, until `begin`
        self._writers: dict[int, int] = {}
        self._peer_of: dict[int, int] = {}  # peer, by the read end of its pipe
        self._poll: select.poll  # polls the read ends (missing on Windows)
        self._sent: defaultdict[tuple[int, int], count[int]] = defaultdict(count)
        self._expected: defaultdict[tuple[int, int], count[int]] = defaultdict(count)
        self._raw: deque[tuple[int, tuple[int, int, int, int]]] = deque()  # received but not sorted
        # Guards the attributes below. Ctrl-C may interrupt `Condition.__enter__`, not an RLock's.
        self._lock = RLock()
        self._changed = Condition(self._lock)
        self._reader: int | None = None  # id of the thread that reads the pipes
        self._ended: set[int] = set()  # peers whose pipe is closed
        self._contents: dict[Letter, tuple[int, int]] = {}

    def make_pipes(self, peers: Iterable[int]) -> None:
        """Create a pipe for each of ``peers`` to write to. Raises OSError on failure."""
        self._poll = select.poll()
        for peer in peers:
            reader, self.ends[peer] = pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._peer_of[reader] = peer
            self._descriptors.update(pipe)

    def connect(self, peer: int, pid: int, end: int) -> bool:
        """Open the write end of a pipe of ``peer`` (process ``pid``). Return False on failure."""
        try:
            writer = os.open(f"/proc/{pid}/fd/{end}", os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                _log.warning("cannot reach process %d by a pipe: %s", pid, error)
            return False
        self._descriptors.add(writer)
        self._writers[peer] = writer
        return stat.S_ISFIFO(os.fstat(writer).st_mode)  # False: the descriptor was reused

    def begin(self, peers: Collection[int]) -> None:
        """Close all pipes except those from and to ``peers``, which are connected both ways."""
        self.ends.clear()
        self._writers = {peer: end for peer, end in self._writers.items() if peer in peers}
        self._peer_of = {end: peer for end, peer in self._peer_of.items() if peer in peers}
        kept = {*self._writers.values(), *self._peer_of}
        _close(self._descriptors - kept)
        self._descriptors &= kept
        for reader in self._peer_of:
            self._poll.register(reader, select.POLLIN)

    def post(self, peer: int, tag: int, first: int, second: int) -> None:
        """Send a message. If the peer has closed its pipe, the message is dropped."""
        message, deadline = _MESSAGE.pack(tag, next(self._sent[peer, tag]), first, second), None
        me = get_ident()
        while True:
            try:
                os.write(self._writers[peer], message)
                return
            except BrokenPipeError:
                return
            except BlockingIOError:  # the pipe is full, and the peer may wait for this rank to read
                deadline = deadline or time.monotonic() + self._timeout_s
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"rank {peer} has read no message for {self._timeout_s:g} s"
                    ) from None
                try:
                    with self._lock:
                        may_read = self._become_reader(_FULL_S)
                    if may_read:
                        self._read(_FULL_S)
                finally:
                    if self._reader == me:
                        self._reader = None

    def expect(self, peer: int, tag: int) -> Letter:
        """Return a letter for the next message of ``peer`` with ``tag``."""
        return peer, tag, next(self._expected[peer, tag])

    def wait(self, letter: Letter) -> tuple[int, int]:
        """Wait for a letter and return its two numbers. Must not be called twice for a letter."""
        peer, deadline, me = letter[0], None, get_ident()
        while True:
            try:
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
            finally:
                if self._reader == me:
                    self._reader = None

    def _become_reader(self, seconds: float) -> bool:
        """Make this thread the pipes' reader, or wait up to ``seconds`` and return False."""
        if self._reader in (None, get_ident()):
            self._reader = get_ident()
            return True
        self._changed.wait(min(seconds, _RECHECK_S))
        return False

    def _read(self, seconds: float) -> None:
        """Wait up to ``seconds`` for messages, then read and sort them."""
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
    """Close the pipes in a forked child, so that peers notice when the parent ends."""
    for mailbox in list(_mailboxes):
        _close(mailbox._descriptors)
        mailbox._descriptors.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
